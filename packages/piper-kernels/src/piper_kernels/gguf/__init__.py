"""Packed GGUF tensor bytes: sizes, shapes and portable decoding. Files are not parsed here."""

from piper_kernels.gguf._decode import dequantize
from piper_kernels.gguf._tensor import reshape_packed
from piper_kernels.gguf._types import (
    GGUF_QUANT_SIZES,
    SUPPORTED_GGUF_QUANT_TYPES,
    GGUFQuantizationType,
    logical_shape,
    packed_row_size,
)

__all__ = [
    "GGUF_QUANT_SIZES",
    "SUPPORTED_GGUF_QUANT_TYPES",
    "GGUFQuantizationType",
    "dequantize",
    "logical_shape",
    "packed_row_size",
    "reshape_packed",
]
