"""Numba: kernels compiled once and kept on disk, and the arrays they work on."""
