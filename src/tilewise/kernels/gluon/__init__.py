"""Kernels in Gluon, Triton's lower level, for GPUs whose units have to be driven by hand: Hopper."""
