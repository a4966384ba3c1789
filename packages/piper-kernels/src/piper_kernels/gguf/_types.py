"""The GGML tensor types that can be decoded, and the sizes of their blocks."""

from collections.abc import Sequence
from enum import IntEnum
from types import MappingProxyType


class GGUFQuantizationType(IntEnum):
    """GGML tensor types under their identifiers in GGUF files."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ4_NL = 20
    IQ4_XS = 23
    BF16 = 30


GGUF_QUANT_SIZES = MappingProxyType(
    {
        GGUFQuantizationType.F32: (1, 4),
        GGUFQuantizationType.F16: (1, 2),
        GGUFQuantizationType.Q4_0: (32, 18),
        GGUFQuantizationType.Q4_1: (32, 20),
        GGUFQuantizationType.Q5_0: (32, 22),
        GGUFQuantizationType.Q5_1: (32, 24),
        GGUFQuantizationType.Q8_0: (32, 34),
        GGUFQuantizationType.Q2_K: (256, 84),
        GGUFQuantizationType.Q3_K: (256, 110),
        GGUFQuantizationType.Q4_K: (256, 144),
        GGUFQuantizationType.Q5_K: (256, 176),
        GGUFQuantizationType.Q6_K: (256, 210),
        GGUFQuantizationType.IQ4_NL: (32, 18),
        GGUFQuantizationType.IQ4_XS: (256, 136),
        GGUFQuantizationType.BF16: (1, 2),
    }
)
"""Type to ``(elements, bytes)`` of one block."""

SUPPORTED_GGUF_QUANT_TYPES = frozenset(GGUF_QUANT_SIZES)


def resolve_quant_type(quant_type: object, data: object = None) -> GGUFQuantizationType:
    """Return a type given as a member, an integer or the ``quant_type`` attribute of ``data``.

    Raises:
        TypeError: Neither names a type, or it is not an integer.
        ValueError: The type cannot be decoded.
    """
    if quant_type is None:
        quant_type = getattr(data, "quant_type", None)
    if quant_type is None:
        raise TypeError(
            "GGUF conversion requires quant_type: pass it, or give data a quant_type attribute"
        )
    if isinstance(quant_type, bool) or not isinstance(quant_type, int):
        raise TypeError(
            f"quant_type must be an integer or GGUFQuantizationType, got {quant_type!r}"
        )
    try:
        return GGUFQuantizationType(int(quant_type))
    except ValueError:
        supported = ", ".join(f"{t.name} ({t.value})" for t in GGUFQuantizationType)
        name = getattr(quant_type, "name", int(quant_type))
        raise ValueError(
            f"GGUF quantization type {name} is not supported; supported: {supported}"
        ) from None


def logical_shape(packed_shape: Sequence[int], quant_type: int) -> tuple[int, ...]:
    """Return the shape of the values that packed bytes ``[..., row_bytes]`` hold.

    Raises:
        TypeError: ``quant_type`` is not an integer.
        ValueError: The type is not supported, there is no axis, or a row is not a whole
            number of blocks.
    """
    kind = resolve_quant_type(quant_type)
    if not packed_shape:
        raise ValueError(f"packed {kind.name} data must have at least one axis, got a scalar")
    elements, block_bytes = GGUF_QUANT_SIZES[kind]
    row_bytes = packed_shape[-1]
    if row_bytes % block_bytes:
        raise ValueError(
            f"packed {kind.name} rows must be a multiple of the {block_bytes}-byte block "
            f"({elements} elements), got rows of {row_bytes} bytes in shape {tuple(packed_shape)}: "
            "check quant_type, or restore the row length with reshape_packed"
        )
    return (*packed_shape[:-1], row_bytes // block_bytes * elements)


def packed_row_size(features: int, quant_type: int) -> int:
    """Return the bytes that pack a row of ``features`` values.

    Raises:
        TypeError: ``quant_type`` is not an integer.
        ValueError: The type is not supported or its blocks do not divide ``features``.
    """
    kind = resolve_quant_type(quant_type)
    elements, block_bytes = GGUF_QUANT_SIZES[kind]
    if features < 0 or features % elements:
        raise ValueError(
            f"{kind.name} packs rows of a multiple of {elements} elements, got {features}"
        )
    return features // elements * block_bytes
