"""Compute kernels: convolutions, group norms, random projections, low-rank products; Triton on a GPU, numpy and torch on a CPU."""
