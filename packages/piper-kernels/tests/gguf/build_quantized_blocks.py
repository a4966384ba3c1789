"""Build ``quantized_blocks.safetensors`` with the quantizers of a ggml shared library.

Usage: ``python build_quantized_blocks.py libggml-base.so VERSION``. The library is called
through its C interface: ``ggml_quantize_chunk`` packs one matrix as every block type, and its
own ``dequantize_row_*`` give the digests that the decoders are tested against.
"""

import ctypes
import hashlib
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from piper_kernels.gguf import GGUFQuantizationType, packed_row_size

ROWS, FEATURES = 3, 512
UNQUANTIZED = ("F32", "F16", "BF16")


def source_matrix() -> torch.Tensor:
    """Weights-like rows: one with an outlier, one with a zero stretch, one of large values."""
    source = torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(20)) * 0.05
    source[0, 7] = 1.5
    source[1, 300:330] = 0
    source[2] *= 100
    return source


def main(path: str, version: str) -> None:
    library = ctypes.CDLL(path)
    quantize = library.ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    quantize.argtypes = [
        ctypes.c_int,
        *[ctypes.c_void_p] * 2,
        *[ctypes.c_int64] * 3,
        ctypes.c_void_p,
    ]
    source = source_matrix()
    tensors, metadata = {"source": source}, {"quantizer": f"ggml {version}, ggml_quantize_chunk"}
    for kind in GGUFQuantizationType:
        if kind.name in UNQUANTIZED:
            continue
        packed = torch.zeros(ROWS, packed_row_size(FEATURES, kind), dtype=torch.uint8)
        written = quantize(kind, source.data_ptr(), packed.data_ptr(), 0, ROWS, FEATURES, None)
        assert written == packed.numel(), kind
        # Q4_0 is q4_0 there, Q4_K is q4_K and IQ4_XS is iq4_xs.
        symbol = kind.name.replace("IQ", "iq").replace("Q", "q")
        symbol = symbol.lower() if symbol.startswith("iq") else symbol
        dequantize = library[f"dequantize_row_{symbol}"]
        dequantize.restype = None
        dequantize.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        values = torch.full((ROWS, FEATURES), torch.nan)
        dequantize(packed.data_ptr(), values.data_ptr(), values.numel())
        tensors[kind.name] = packed
        metadata[kind.name] = hashlib.sha256(values.numpy().tobytes()).hexdigest()
    save_file(tensors, Path(__file__).with_name("quantized_blocks.safetensors"), metadata)


if __name__ == "__main__":
    main(*sys.argv[1:])
