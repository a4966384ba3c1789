"""ConvRot NVFP4: rotated weights stored as four-bit codes in blocks of 16 with E4M3 scales."""

from piper_kernels.weights.convrot.nvfp4.tensor import ConvRotNVFP4Tensor

__all__ = ["ConvRotNVFP4Tensor"]
