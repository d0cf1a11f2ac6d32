"""Layer 0: trees of named tensors, their specifications, randomness that two machines share, and names of parts."""
