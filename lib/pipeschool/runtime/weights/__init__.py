"""The weights of a stage: their versions, their gradients, and who else has a share in them."""
