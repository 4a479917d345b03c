"""Kernels in plain Triton, for every GPU that it compiles for."""
