"""NVFP4 weights: four-bit codes in blocks of 16 with E4M3 scales."""

from piper_kernels.weights.nvfp4.tensor import PiperNVFP4Tensor

__all__ = ["PiperNVFP4Tensor"]
