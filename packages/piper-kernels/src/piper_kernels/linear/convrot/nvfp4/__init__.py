"""ConvRot NVFP4 linear: NVFP4 weights in a rotated basis."""

from piper_kernels.linear.convrot.nvfp4._compile_options import convrot_nvfp4_compile_options
from piper_kernels.linear.convrot.nvfp4._functional import convrot_nvfp4_linear

__all__ = ["convrot_nvfp4_compile_options", "convrot_nvfp4_linear"]
