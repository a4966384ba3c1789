"""Turns rows of a dense weight into the tensors of a quantized checkpoint."""

from typing import Protocol

import torch

from phyai_quant.offline.rotated import ConvRotInt8Encoder, ConvRotNvFp4Encoder
from phyai_quant.offline.shapes import Layout, ceil_div, check_divides
from phyai_quant.scheme import Granularity, QDType, QuantConfigError, QuantScheme, TensorQuant
from phyai_quant.specs import _packing, _rtn

WRITABLE = (QDType.FP8_E4M3, QDType.INT8, QDType.INT4, QDType.NVFP4, QDType.MXFP4)
"""Weight dtypes that checkpoint layouts hold."""

_NVFP4_MAX = 448.0 * 6.0
_GLOBAL_FLOOR = 1e-12
_SCALE_FLOOR = 1e-30


class Encoder(Protocol):
    """Quantizes a weight ``[N, K]`` in pieces of whole rows.

    `measure` sees every row first when `two_passes`, and the largest result is handed to the other
    methods; `encode` then sees the rows in order, in pieces whose length is a multiple of
    `row_multiple` but for the last. The pieces of a tensor are appended to each other; `constants`
    are written once.
    """

    row_multiple: int
    two_passes: bool

    def layout(self, rows: int, columns: int) -> Layout:
        """Returns dtype and shape of each checkpoint tensor; errors when K does not fit."""
        ...

    def measure(self, dense: torch.Tensor) -> torch.Tensor:
        """Returns a scalar of fp32 rows; the largest over all rows sets the shared scale."""
        ...

    def encode(self, dense: torch.Tensor, largest: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the pieces of the tensors that belong to fp32 rows ``[n, K]``."""
        ...

    def constants(self, rows: int, columns: int, largest: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the tensors that do not grow with the rows."""
        ...


class RowsEncoder:
    """fp8, int8, int4 and mxfp4 weights whose rows or blocks of rows stand alone.

    Args:
        scheme: What to quantize to: per_channel or block.
        scale_dtype: Dtype of the stored scales, except of mxfp4.
    """

    two_passes = False

    def __init__(self, scheme: QuantScheme, scale_dtype: torch.dtype) -> None:
        self.weight: TensorQuant = scheme.weight
        self.packed: bool = is_packed(scheme)
        self.scale_dtype = scale_dtype
        self.row_multiple: int = (
            1 if self.weight.block_shape is None else self.weight.block_shape[0]
        )

    def layout(self, rows: int, columns: int) -> Layout:
        """Returns the codes under the name of the format, and ``weight_scale``."""
        block_n, block_k = self.weight.block_shape or (1, columns)
        if self.weight.dtype is not QDType.FP8_E4M3 or block_n == 1:
            check_divides("group" if block_n == 1 else "block", block_k, columns)
        scales = (ceil_div(rows, block_n), ceil_div(columns, block_k))
        scale_dtype = torch.uint8 if self.weight.dtype is QDType.MXFP4 else self.scale_dtype
        codes = _codes_layout(self.weight.dtype, rows, columns, packed=self.packed)
        return {**codes, "weight_scale": (scale_dtype, scales)}

    def measure(self, dense: torch.Tensor) -> torch.Tensor:
        """Returns zero: no scale is shared by all rows."""
        return dense.new_zeros(())

    def encode(self, dense: torch.Tensor, largest: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns codes and scales of these rows."""
        del largest
        found = _rtn.quantize(
            dense, self.weight, scale_dtype=self.scale_dtype, negative_scales=False
        )
        scale = found.scale
        if scale.dtype == torch.float8_e8m0fnu:
            scale = scale.view(torch.uint8)
        scale = scale[:, None] if scale.ndim == 1 else scale
        codes = _named_codes(self.weight.dtype, found.codes, packed=self.packed)
        return {**codes, "weight_scale": scale}

    def constants(self, rows: int, columns: int, largest: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the shape of packed integers."""
        del largest
        return {"weight_shape": torch.tensor([rows, columns])} if self.packed else {}


class TensorEncoder:
    """fp8, int8 and int4 weights with one scale: the largest magnitude over the largest code.

    Arguments as `RowsEncoder`.
    """

    two_passes = True
    row_multiple = 1

    def __init__(self, scheme: QuantScheme, scale_dtype: torch.dtype) -> None:
        self.dtype: QDType = scheme.weight.dtype
        self.packed: bool = is_packed(scheme)
        self.scale_dtype = scale_dtype
        bits = _rtn.INT_BITS.get(self.dtype)
        self.largest_code: float = 2 ** (bits - 1) - 1 if bits else _rtn.FLOAT_MAX[self.dtype]

    def layout(self, rows: int, columns: int) -> Layout:
        """Returns the codes under the name of the format, and ``weight_scale`` ``[1]``."""
        codes = _codes_layout(self.dtype, rows, columns, packed=self.packed)
        return {**codes, "weight_scale": (self.scale_dtype, (1,))}

    def measure(self, dense: torch.Tensor) -> torch.Tensor:
        """Returns ``max|w|``."""
        return dense.abs().amax()

    def encode(self, dense: torch.Tensor, largest: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the codes of these rows."""
        quotients = dense / self._scale(largest).float()
        if self.dtype is QDType.FP8_E4M3:
            codes = _rtn.encode_fp8(quotients, self.dtype)
        else:
            codes = quotients.round().clamp(-self.largest_code, self.largest_code).to(torch.int8)
        return _named_codes(self.dtype, codes, packed=self.packed)

    def constants(self, rows: int, columns: int, largest: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the scale, and the shape of packed integers."""
        shape = {"weight_shape": torch.tensor([rows, columns])} if self.packed else {}
        return {**shape, "weight_scale": self._scale(largest).reshape(1)}

    def _scale(self, largest: torch.Tensor) -> torch.Tensor:
        return (largest / self.largest_code).clamp_min(_SCALE_FLOOR).to(self.scale_dtype)


class NvFp4Encoder:
    """NVFP4: E4M3 scales of 16 elements, and a global scale stored as its reciprocal."""

    two_passes = True
    row_multiple = 1

    def layout(self, rows: int, columns: int) -> Layout:
        """Returns codes, block scales and the global scale; errors unless 16 divides K."""
        check_divides("block", 16, columns)
        return {
            "weight_packed": (torch.uint8, (rows, columns // 2)),
            "weight_scale": (torch.float8_e4m3fn, (rows, columns // 16)),
            "weight_global_scale": (torch.float32, (1,)),
        }

    def measure(self, dense: torch.Tensor) -> torch.Tensor:
        """Returns ``max|w|``."""
        return dense.abs().amax()

    def encode(self, dense: torch.Tensor, largest: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns packed codes and block scales of these rows."""
        multiplier = 1 / _reciprocal(largest)
        blocks = dense.unflatten(1, (-1, 16))
        tiny = torch.finfo(torch.float8_e4m3fn).tiny
        wanted = blocks.abs().amax(dim=2) / 6.0 / multiplier
        scale = wanted.clamp(tiny, 448.0).to(torch.float8_e4m3fn)
        codes = _rtn.encode_e2m1(blocks / (scale.float() * multiplier)[:, :, None])
        return {"weight_packed": _packing.pack_nibbles(codes.flatten(1)), "weight_scale": scale}

    def constants(self, rows: int, columns: int, largest: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the reciprocal of the global scale."""
        del rows, columns
        return {"weight_global_scale": _reciprocal(largest).reshape(1)}


def make_encoder(scheme: QuantScheme, source: torch.dtype) -> Encoder:
    """Returns what writes a scheme.

    Args:
        scheme: What to quantize to.
        source: Dtype of the dense weight. bf16 weights get bf16 scales; others fp32 ones, because
            fp16 has too little range for small scales.

    Raises:
        QuantConfigError: No checkpoint layout holds the scheme.
    """
    weight = scheme.weight
    if weight.dtype not in WRITABLE:
        raise QuantConfigError(
            f"no checkpoint layout holds {weight.describe()} weights; writable: "
            f"{', '.join(WRITABLE)}; quantize {weight.dtype.value} while loading instead"
        )
    if weight.rotation_group is not None:
        int8 = weight.dtype is QDType.INT8
        make = ConvRotInt8Encoder if int8 else ConvRotNvFp4Encoder
        return make(weight.rotation_group, source)
    if weight.dtype is QDType.NVFP4:
        if scheme.input is not None:
            raise QuantConfigError(
                "an nvfp4 checkpoint with nvfp4 inputs needs calibrated input scales, which "
                "quantizing weights alone cannot give; leave the rule's 'input' out"
            )
        return NvFp4Encoder()
    scale_dtype = torch.bfloat16 if source == torch.bfloat16 else torch.float32
    per_tensor = weight.granularity is Granularity.PER_TENSOR
    return (TensorEncoder if per_tensor else RowsEncoder)(scheme, scale_dtype)


def is_packed(scheme: QuantScheme) -> bool:
    """Tells whether integer codes are packed into words: int4 always, int8 when weight-only."""
    weight = scheme.weight
    return weight.dtype is QDType.INT4 or (weight.dtype is QDType.INT8 and scheme.weight_only)


def _codes_layout(dtype: QDType, rows: int, columns: int, *, packed: bool) -> Layout:
    if packed:
        words = ceil_div(columns * _rtn.INT_BITS[dtype], 32)
        return {"weight_packed": (torch.int32, (rows, words)), "weight_shape": (torch.int64, (2,))}
    if dtype is QDType.MXFP4:
        return {"weight_packed": (torch.uint8, (rows, columns // 2))}
    stored = torch.int8 if dtype is QDType.INT8 else torch.float8_e4m3fn
    return {"weight": (stored, (rows, columns))}


def _named_codes(dtype: QDType, codes: torch.Tensor, *, packed: bool) -> dict[str, torch.Tensor]:
    if dtype is QDType.MXFP4:
        return {"weight_packed": _packing.pack_nibbles(codes)}
    if not packed:
        return {"weight": codes}
    bits = _rtn.INT_BITS[dtype]
    unsigned = _packing.to_unsigned(codes, bits)
    padded = torch.nn.functional.pad(unsigned, (0, -codes.shape[1] % (32 // bits)))
    return {"weight_packed": _packing.pack_words(padded, bits)}


def _reciprocal(largest: torch.Tensor) -> torch.Tensor:
    return 1 / (largest / _NVFP4_MAX).clamp_min(_GLOBAL_FLOOR)
