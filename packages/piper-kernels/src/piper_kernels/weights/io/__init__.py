"""Quantized weights in safetensors files, written in two layouts and read without a copy.

The bytes of every format are specified in ``docs/formats.md``. Needs the safetensors package.
"""

from piper_kernels.weights.io._errors import WeightFileError
from piper_kernels.weights.io._files import Layout, load_quantized, read_metadata, save_quantized
from piper_kernels.weights.io._gguf_shapes import original_gguf_shape
from piper_kernels.weights.io._header import SafetensorsHeader, StoredTensor, read_header
from piper_kernels.weights.io._rows import RowQuantizedWeight, quantize_int8

__all__ = [
    "Layout",
    "RowQuantizedWeight",
    "SafetensorsHeader",
    "StoredTensor",
    "WeightFileError",
    "load_quantized",
    "original_gguf_shape",
    "quantize_int8",
    "read_header",
    "read_metadata",
    "save_quantized",
]
