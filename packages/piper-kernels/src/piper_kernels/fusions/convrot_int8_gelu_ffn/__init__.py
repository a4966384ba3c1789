"""GELU feed-forward networks of ConvRot INT8 linears, computed by chunks of rows."""

from piper_kernels.fusions.convrot_int8_gelu_ffn._compile_options import (
    convrot_int8_gelu_ffn_compile_options,
)

__all__ = ["convrot_int8_gelu_ffn_compile_options"]
