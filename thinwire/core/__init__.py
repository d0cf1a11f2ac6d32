"""Trees of named tensors, their specs, shared randomness, the registry of parts, threads and text."""
