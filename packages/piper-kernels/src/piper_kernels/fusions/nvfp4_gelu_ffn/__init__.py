"""GELU feed-forward networks of NVFP4 linears, computed by chunks of rows."""

from piper_kernels.fusions.nvfp4_gelu_ffn._compile_options import (
    nvfp4_gelu_ffn_compile_options,
)

__all__ = ["nvfp4_gelu_ffn_compile_options"]
