"""The layers of a stage at work on microbatches."""
