"""What Humming stores for each scheme: names, shapes and scales, without the library."""

from dataclasses import dataclass

import torch
from torch import nn

from phyai_quant.online_rules import minimum_sm
from phyai_quant.scheme import Granularity, QDType, QuantConfigError, QuantScheme, TensorQuant
from phyai_quant.specs import _rtn, base, loading
from phyai_quant.specs.bf16 import check_params_dtype

_BITS = {QDType.INT4: 4, QDType.NVFP4: 4, QDType.MXFP4: 4}
_HALF_DTYPES = (torch.bfloat16, torch.float16)
_ACTIVATION_FLOOR = 1e-30


@dataclass(frozen=True, slots=True)
class HummingFormat:
    """The storage of one scheme.

    Raw tensors, from which the packed ones are made: ``weight`` int32 ``[N, K * bits / 32]``,
    lowest k in the lowest bits, integers as ``code + 2^(bits-1)``; ``weight_scale`` as
    `scale_shape` says; ``weight_scale_2`` fp32 ``[1]`` for nvfp4.

    Attributes:
        weight: Quantization of the weight.
        activation: Quantization of the input; None keeps it in 16 bits.
    """

    weight: TensorQuant
    activation: TensorQuant | None

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return _BITS.get(self.weight.dtype, 8)

    @property
    def scale_type(self) -> str:
        """How weights share scales, in Humming's words: tensor, channel, group or block."""
        if self.weight.block_shape is None:
            per_tensor = self.weight.granularity is Granularity.PER_TENSOR
            return "tensor" if per_tensor else "channel"
        return "block" if self.weight.block_shape[0] > 1 else "group"

    @property
    def couples_legs(self) -> bool:
        """True when a scale is shared by all rows, so by all legs of a fused layer."""
        return self.scale_type == "tensor" or self.weight.dtype is QDType.NVFP4

    def scale_dtype(self, params_dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype of ``weight_scale``."""
        if self.weight.micro_scaled:
            micro = {QDType.NVFP4: torch.float8_e4m3fn, QDType.MXFP4: torch.float8_e8m0fnu}
            return micro[self.weight.dtype]
        return torch.float32 if self.scale_type in ("tensor", "block") else params_dtype

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Returns the shape of ``weight_scale`` of a weight ``[rows, columns]``."""
        if self.scale_type == "tensor":
            return (1,)
        block_n, block_k = self.weight.block_shape or (1, columns)
        return (rows // block_n, columns // block_k)

    def spec_id(self, layout: str) -> str:
        """Returns the id of a spec that stores this in ``layout``."""
        if self.weight.block_shape is None:
            shape = self.weight.granularity.value
        else:
            shape = f"{self.weight.block_shape[0]}x{self.weight.block_shape[1]}"
        return f"{layout}_{self.weight.dtype.value}_{self._activation_name}_{shape}"

    def signature(self, layout: str) -> base.PhysicalSignature:
        """Returns the facts for kernel dispatch."""
        named_scale = self.weight.micro_scaled or self.scale_type in ("tensor", "block")
        fields: list[tuple[str, object]] = [
            ("activation", self._activation_name),
            ("scale_type", self.scale_type),
            ("scale_2_type", "tensor" if self.weight.dtype is QDType.NVFP4 else "none"),
        ]
        if self.activation is not None:
            fields += [("input_granularity", "per_channel"), ("input_scale", "dynamic")]
        return base.PhysicalSignature(
            format=self.weight.dtype.value,
            layout=layout,
            block_shape=self.weight.block_shape,
            scale_dtype=str(self.scale_dtype(torch.float32)) if named_scale else None,
            granularity=self.weight.granularity.value,
            storage_dtype="int32",
            fields=tuple(fields),
        )

    @property
    def _activation_name(self) -> str:
        return "a16" if self.activation is None else self.activation.dtype.value


def format_of(scheme: QuantScheme) -> HummingFormat:
    """Returns the storage of a scheme."""
    return HummingFormat(scheme.weight, scheme.input)


def find_misfit(
    stored: HummingFormat, request: base.AllocationRequest, *, packed: bool
) -> str | None:
    """Returns why a layer cannot be stored, or None.

    Packed tensors need whole tiles and 16-bit products; raw ones only whole words and blocks.
    """
    rows, columns = request.weight_shape
    block_n, block_k = stored.weight.block_shape or (1, 1)
    step_k = (32 if stored.activation is None else 64) if packed else 32 // stored.bits
    step_n = 64 if packed else 1
    steps = [("N", rows, step_n), ("K", columns, step_k)]
    steps += [("K", columns, block_k), ("N", rows, block_n)]
    steps += [
        (f"the width of leg {leg!r}", width, block_n)
        for leg, width in zip(request.shard_ids, request.logical_widths, strict=True)
    ]
    for what, size, step in steps:
        if size % step:
            return f"{what} = {size} is not a multiple of {step}"
    if packed and request.params_dtype not in _HALF_DTYPES:
        return f"params_dtype is {request.params_dtype}; allowed: torch.bfloat16, torch.float16"
    e5m2_input = stored.activation is not None and stored.activation.dtype is QDType.FP8_E5M2
    needs_bf16 = stored.weight.dtype is QDType.MXFP4 or e5m2_input
    if packed and needs_bf16 and request.params_dtype is not torch.bfloat16:
        return f"params_dtype is {request.params_dtype}; allowed: torch.bfloat16"
    return None


def check_fits(
    layer: nn.Module, stored: HummingFormat, request: base.AllocationRequest, *, packed: bool
) -> None:
    """Raises QuantConfigError when a layer cannot be stored."""
    check_params_dtype(layer, request.params_dtype)
    misfit = find_misfit(stored, request, packed=packed)
    if misfit is not None:
        raise QuantConfigError(
            f"{loading.layer_name(layer)}: Humming cannot store {stored.weight.describe()} here: "
            f"{misfit}; change the scheme or keep the layer unquantized"
        )


def why_unusable(scheme: QuantScheme, sm: int, *, installed: bool) -> str | None:
    """Returns why an NVIDIA GPU of version ``sm`` cannot run a scheme with Humming, or None."""
    floor = minimum_sm(scheme)
    if sm < floor:
        return f"it needs SM{floor} or newer and this GPU is SM{sm}; use another scheme"
    if not installed:
        return "humming-kernels is not installed; install it or use another scheme"
    return None


def quantize_token_rows(x: torch.Tensor, activation: TensorQuant) -> base.ActivationView:
    """Quantizes ``[..., K]`` with one scale per row, as Humming does: ``max|x| / format_max``."""
    rows = x.reshape(-1, x.shape[-1]).float()
    is_int = activation.dtype is QDType.INT8
    top = 127.0 if is_int else _rtn.FLOAT_MAX[activation.dtype]
    scale = (rows.abs().amax(dim=1) / top).clamp_min(_ACTIVATION_FLOOR)
    scaled = (rows * scale.reciprocal()[:, None]).clamp(-top, top)
    dtype = torch.float8_e4m3fn if activation.dtype is QDType.FP8_E4M3 else torch.float8_e5m2
    codes = torch.round(scaled).to(torch.int8) if is_int else scaled.to(dtype)
    return base.ActivationView(codes, scale, Granularity.PER_CHANNEL)
