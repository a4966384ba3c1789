"""Gluon kernels of dense 8-bit attention for Hopper. Importing a module needs Triton with Gluon."""
