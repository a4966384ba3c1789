"""Triton kernels of ConvRot INT8 convolutions."""
