"""Compute kernels: convolution, group norm, random projection, low-rank products; Triton, numpy and torch."""
