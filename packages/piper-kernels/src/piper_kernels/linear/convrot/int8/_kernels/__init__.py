"""Triton kernels of ConvRot INT8 linear for every target. Importing them needs Triton."""
