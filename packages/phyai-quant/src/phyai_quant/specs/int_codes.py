"""Integer codes in int32 words, as pack-quantized checkpoints store them."""

import torch
from torch import nn

from phyai_quant.scheme import QDType, QuantConfigError
from phyai_quant.specs import _packing, loading

BITS = {QDType.INT4: 4, QDType.INT8: 8}
"""Width of each integer format."""


def code_range(bits: int) -> tuple[int, int]:
    """Returns the lowest and the highest signed code."""
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def words_for(size: int, bits: int) -> int:
    """Returns how many int32 words hold ``size`` codes; the last may be partial."""
    return -(-size * bits // 32)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs signed int8 codes ``[R, C]`` into int32 ``[R, ceil(C * bits / 32)]``.

    Words hold ``code + 2^(bits-1)``, lowest column in the lowest bits; the rest of a partial last
    word is 0.
    """
    padding = words_for(codes.shape[1], bits) * 32 // bits - codes.shape[1]
    unsigned = nn.functional.pad(_packing.to_unsigned(codes, bits), (0, padding))
    return _packing.pack_words(unsigned, bits)


def unpack(words: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Returns the signed int8 codes ``[R, columns]`` of int32 words."""
    return _packing.to_signed(_packing.unpack_words(words, bits)[:, :columns], bits)


def check_tensor(
    layer: nn.Module,
    name: str,
    loaded: torch.Tensor,
    *,
    dtypes: tuple[torch.dtype, ...],
    shapes: tuple[tuple[int, ...], ...] = (),
) -> None:
    """Raises QuantConfigError unless a checkpoint tensor has one of the dtypes and shapes."""
    if loaded.dtype not in dtypes:
        raise QuantConfigError(
            f"{loading.layer_name(layer)}: checkpoint tensor {name!r} is {loaded.dtype}; "
            f"allowed: {', '.join(map(str, dtypes))}; check that the quantization config belongs "
            "to this checkpoint, and exclude the layer in it if the layer is stored otherwise"
        )
    if shapes and tuple(loaded.shape) not in shapes:
        raise QuantConfigError(
            f"{loading.layer_name(layer)}: checkpoint tensor {name!r} has shape "
            f"{list(loaded.shape)}, the layer expects "
            f"{' or '.join(str(list(shape)) for shape in dict.fromkeys(shapes))}"
        )


def check_codes(layer: nn.Module, name: str, codes: torch.Tensor, bits: int) -> None:
    """Raises QuantConfigError when integers do not fit ``bits``."""
    low, high = code_range(bits)
    always_fit = bits == 8 and codes.dtype == torch.int8
    if not always_fit and codes.numel() and (codes.amin() < low or codes.amax() > high):
        raise QuantConfigError(
            f"{loading.layer_name(layer)}: checkpoint tensor {name!r} holds codes "
            f"{int(codes.amin())} to {int(codes.amax())}, the config says int{bits}; allowed: "
            f"{low} to {high}"
        )


def whole_shape(layer: nn.Module, legs: range) -> tuple[int, int]:
    """Returns ``(rows, columns)`` of the checkpoint weight of consecutive legs, before cutting."""
    slices = loading.load_state(layer).request.slices
    return sum(slices[leg].full_shape[0] for leg in legs), slices[legs.start].full_shape[1]
