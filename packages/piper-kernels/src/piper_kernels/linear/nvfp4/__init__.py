"""NVFP4 linear: inputs in the logical dtype or in NVFP4 times NVFP4 weights."""

from piper_kernels.linear.nvfp4._compile_options import nvfp4_compile_options

__all__ = ["nvfp4_compile_options"]
