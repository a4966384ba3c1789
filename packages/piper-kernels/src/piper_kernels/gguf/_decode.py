"""Portable decoders of GGML blocks.

Every decoder takes uint8 blocks ``[N, block_bytes]`` and returns FP32 ``[N, elements]``. The
order of the FP32 operations is that of ggml, so that the values agree bit by bit.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from piper_kernels.gguf._tensor import as_bytes, require_same_elements
from piper_kernels.gguf._types import (
    GGUF_QUANT_SIZES,
    GGUFQuantizationType,
    logical_shape,
    resolve_quant_type,
)

IQ4_CODEBOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

_CPU_PIECE_VALUES = 1 << 17

_Decoder = Callable[[Tensor], Tensor]


def dequantize(
    data_uint8: Tensor, quant_type: int | None = None, *, shape: Sequence[int] | None = None
) -> Tensor:
    """Decode packed GGUF data on its own device.

    Args:
        data_uint8: Packed rows ``[..., row_bytes]``; other dtypes are reinterpreted as bytes.
        quant_type: Type of the data; ``None`` reads ``data_uint8.quant_type``.
        shape: Original logical shape, where the file recorded one that differs from the
            stored rows; the rows implied by the bytes when omitted.

    Returns:
        FP32 values with the logical shape.

    Raises:
        TypeError: The data is not a tensor, or the type is missing or not an integer.
        ValueError: The type is not supported, a row is not a whole number of blocks, or
            ``shape`` holds another number of elements.
    """
    kind = resolve_quant_type(quant_type, data_uint8)
    raw = as_bytes(data_uint8)
    stored = logical_shape(raw.shape, kind)
    if shape is not None:
        require_same_elements(stored, shape, kind.name)
    elements, block_bytes = GGUF_QUANT_SIZES[kind]
    values = _decode(raw.view(-1, block_bytes), _DECODERS[kind], elements)
    return values.view(tuple(stored if shape is None else shape))


def _decode(blocks: Tensor, decoder: _Decoder, elements: int) -> Tensor:
    """Decode blocks, on the CPU in pieces whose intermediate values stay in its caches."""
    step = _CPU_PIECE_VALUES // elements
    if blocks.device.type != "cpu" or blocks.shape[0] <= step:
        return decoder(blocks)
    values = torch.empty((blocks.shape[0], elements), dtype=torch.float32)
    for piece, part in zip(values.split(step), blocks.split(step), strict=True):
        piece.copy_(decoder(part))
    return values


def _half(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 at byte ``start`` of every block as FP32 ``[N, 1]``."""
    # A copy even of one block, whose two bytes are contiguous at whatever address.
    halves = blocks[:, start : start + 2].clone(memory_format=torch.contiguous_format)
    return halves.view(torch.float16).float()


def _signed(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int8)


def _fields(values: Tensor, bits: int) -> Tensor:
    """Split bytes ``[N, *, B]`` into planes ``[N, *, 8 / bits, B]``, lowest bits first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=values.device).view(-1, 1)
    return (values.unsqueeze(-2) >> shifts) & ((1 << bits) - 1)


def _nibbles(values: Tensor) -> Tensor:
    return _fields(values, 4).flatten(1)


def _codebook(codes: Tensor) -> Tensor:
    table = torch.tensor(IQ4_CODEBOOK, dtype=torch.float32, device=codes.device)
    return table[codes.int()]


def _bits(values: Tensor) -> Tensor:
    """Return bits ``[N, 8 B]`` of bytes ``[N, B]``: all bits of byte 0 first, lowest first."""
    return _fields(values.unsqueeze(-1), 1).flatten(1)


def _reinterpret(dtype: torch.dtype) -> _Decoder:
    def decode(blocks: Tensor) -> Tensor:
        if blocks.storage_offset() % dtype.itemsize:
            blocks = blocks.clone()
        values = blocks.view(dtype)
        return values.clone() if dtype == torch.float32 else values.float()

    return decode


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 6:]) | (_bits(blocks[:, 2:6]) << 4)
    return _half(blocks, 0) * (codes.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 8:]) | (_bits(blocks[:, 4:8]) << 4)
    return _half(blocks, 0) * codes.float() + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _signed(blocks[:, 2:]).float()


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _codebook(_nibbles(blocks[:, 2:]))


def _q2_k(blocks: Tensor) -> Tensor:
    packed_scales = blocks[:, :16]
    scale = _half(blocks, 80) * (packed_scales & 15).float()
    minimum = _half(blocks, 82) * (packed_scales >> 4).float()
    codes = _fields(blocks[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    return (scale.unsqueeze(-1) * codes.float() - minimum.unsqueeze(-1)).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    low = _fields(blocks[:, 32:96].reshape(-1, 2, 32), 2).flatten(1)
    high = _fields(blocks[:, :32], 1).flatten(1)
    scale_low = _fields(blocks[:, 96:104], 4).flatten(1)
    scale_high = _fields(blocks[:, 104:108], 2).flatten(1)
    scale = (scale_low | (scale_high << 4)).float() - 32
    codes = low.float() - 4 + (high << 2).float()
    return ((_half(blocks, 108) * scale).unsqueeze(-1) * codes.view(-1, 16, 16)).flatten(1)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack the eight 6-bit scales and minima of Q4_K and Q5_K, each uint8 ``[N, 8]``."""
    scale, minimum, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    return (
        torch.cat((scale & 63, (rest & 15) | ((scale >> 2) & 0x30)), dim=1),
        torch.cat((minimum & 63, (rest >> 4) | ((minimum >> 2) & 0x30)), dim=1),
    )


def _affine_k(blocks: Tensor, codes: Tensor) -> Tensor:
    scale, minimum = _scales_and_minima(blocks)
    factor = (_half(blocks, 0) * scale.float()).unsqueeze(-1)
    offset = (_half(blocks, 2) * minimum.float()).unsqueeze(-1)
    return (factor * codes.view(-1, 8, 32).float() - offset).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    return _affine_k(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)))


def _q5_k(blocks: Tensor) -> Tensor:
    high = _fields(blocks[:, 16:48], 1).flatten(1)
    return _affine_k(blocks, _nibbles(blocks[:, 48:].reshape(-1, 4, 32)) | (high << 4))


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64))
    high = _fields(blocks[:, 128:192].reshape(-1, 2, 32), 2).flatten(1)
    codes = (low | (high << 4)).float() - 32
    factor = _half(blocks, 208) * _signed(blocks[:, 192:208]).float()
    return (factor.unsqueeze(-1) * codes.view(-1, 16, 16)).flatten(1)


def _iq4_xs(blocks: Tensor) -> Tensor:
    scale_low = _fields(blocks[:, 4:8].unsqueeze(-1), 4).flatten(1)
    scale_high = _fields(blocks[:, 2:4].unsqueeze(-1), 2).flatten(1)
    scale = (scale_low | (scale_high << 4)).float() - 32
    values = _codebook(_nibbles(blocks[:, 8:].reshape(-1, 8, 16))).view(-1, 8, 32)
    return ((_half(blocks, 0) * scale).unsqueeze(-1) * values).flatten(1)


_DECODERS: dict[GGUFQuantizationType, _Decoder] = {
    GGUFQuantizationType.F32: _reinterpret(torch.float32),
    GGUFQuantizationType.F16: _reinterpret(torch.float16),
    GGUFQuantizationType.BF16: _reinterpret(torch.bfloat16),
    GGUFQuantizationType.Q4_0: _q4_0,
    GGUFQuantizationType.Q4_1: _q4_1,
    GGUFQuantizationType.Q5_0: _q5_0,
    GGUFQuantizationType.Q5_1: _q5_1,
    GGUFQuantizationType.Q8_0: _q8_0,
    GGUFQuantizationType.Q2_K: _q2_k,
    GGUFQuantizationType.Q3_K: _q3_k,
    GGUFQuantizationType.Q4_K: _q4_k,
    GGUFQuantizationType.Q5_K: _q5_k,
    GGUFQuantizationType.Q6_K: _q6_k,
    GGUFQuantizationType.IQ4_NL: _iq4_nl,
    GGUFQuantizationType.IQ4_XS: _iq4_xs,
}
