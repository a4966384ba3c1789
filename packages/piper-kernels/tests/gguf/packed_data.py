"""Random packed blocks, and a scalar decoder written from the byte layout alone."""

import struct
from pathlib import Path

import torch
from safetensors import safe_open

from piper_kernels.gguf import GGUF_QUANT_SIZES, GGUFQuantizationType

QUANTIZED_BLOCKS = Path(__file__).with_name("quantized_blocks.safetensors")

# Byte offsets of the float16 factors inside a block.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip


def finite_packed(kind, rows, features, seed=0, device="cpu"):
    """Return random packed rows ``[rows, row_bytes]`` whose factors are finite and moderate."""
    kind = GGUFQuantizationType(kind)
    generator = torch.Generator().manual_seed(seed * 100 + int(kind))
    elements, block_bytes = GGUF_QUANT_SIZES[kind]
    if kind.name not in HALVES:
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind.name]
        values = torch.randn(rows, features, generator=generator).to(dtype)
        return values.view(torch.uint8).to(device)
    blocks = rows * features // elements
    packed = torch.randint(0, 256, (blocks, block_bytes), generator=generator, dtype=torch.uint8)
    for offset in HALVES[kind.name]:
        factor = (torch.randn(blocks, 1, generator=generator) * 0.02).half()
        packed[:, offset : offset + 2] = factor.view(torch.uint8)
    return packed.view(rows, -1).to(device)


def real_blocks():
    """Return what a ggml quantizer packed: ``(source, {type: packed}, metadata)``."""
    with safe_open(QUANTIZED_BLOCKS, "pt") as file:
        packed = {k: file.get_tensor(k.name) for k in GGUFQuantizationType if k.name in HALVES}
        return file.get_tensor("source"), packed, file.metadata()


def half(block, offset):
    return struct.unpack_from("<e", block, offset)[0]


def signed(byte):
    return byte - 256 if byte > 127 else byte


def scalar_value(kind, b, i):
    """Decode element ``i`` of a K-quant block in double precision, one element at a time."""
    c, p, g = i // 32, i % 32, i // 16
    if kind == "Q2_K":
        q = b[16 + c // 4 * 32 + p] >> 2 * (c % 4) & 3
        return half(b, 80) * (b[g] & 15) * q - half(b, 82) * (b[g] >> 4)
    if kind == "Q3_K":
        q = b[32 + c // 4 * 32 + p] >> 2 * (c % 4) & 3
        s = (b[96 + g % 8] >> (4 if g >= 8 else 0) & 15) | (b[104 + g % 4] >> 2 * (g // 4) & 3) << 4
        return half(b, 108) * (s - 32) * (q - (0 if b[p] >> c & 1 else 4))
    if kind == "Q6_K":
        low = b[c // 4 * 64 + c % 2 * 32 + p] >> (4 if c % 4 >= 2 else 0) & 15
        high = b[128 + c // 4 * 32 + p] >> 2 * (c % 4) & 3
        return half(b, 208) * signed(b[192 + g]) * ((low | high << 4) - 32)
    base = 16 if kind == "Q4_K" else 48
    q = b[base + c // 2 * 32 + p] >> 4 * (c % 2) & 15
    if kind == "Q5_K":
        q |= (b[16 + p] >> c & 1) << 4
    if c < 4:
        scale, minimum = b[4 + c] & 63, b[8 + c] & 63
    else:
        scale = (b[8 + c] & 15) | (b[c] >> 2 & 0x30)
        minimum = (b[8 + c] >> 4) | (b[4 + c] >> 2 & 0x30)
    return half(b, 0) * scale * q - half(b, 2) * minimum
