"""GELU feed-forward networks of ConvRot NVFP4 linears, computed by chunks of rows."""

from piper_kernels.fusions.convrot_nvfp4_gelu_ffn._compile_options import (
    convrot_nvfp4_gelu_ffn_compile_options,
)

__all__ = ["convrot_nvfp4_gelu_ffn_compile_options"]
