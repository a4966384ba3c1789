"""ConvRot INT8 projections fused with dense Piper attention."""

from piper_kernels.fusions.convrot_int8_piper._compile_options import (
    convrot_int8_piper_compile_options,
)

__all__ = ["convrot_int8_piper_compile_options"]
