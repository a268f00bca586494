"""PyTorch's own pipeline engine behind the same call."""
