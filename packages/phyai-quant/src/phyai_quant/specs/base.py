"""What every physical weight format answers to, and what it is asked with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from phyai_quant.scheme import Granularity, QuantConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

ShardId = str | int | None
"""Which leg of a fused layer a tensor is for, such as ``"q"`` or 0; None is the whole layer."""

_DTYPE_NAMES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "float8_e8m0fnu": "fp8_e8m0",
}


def dtype_name(dtype: object) -> str:
    """Returns the short lower-case name of a dtype: ``torch.float32`` -> ``fp32``."""
    text = str(dtype).removeprefix("torch.").lower()
    return _DTYPE_NAMES.get(text, text)


@dataclass(frozen=True, slots=True)
class PhysicalSignature:
    """Facts about a stored weight that a kernel dispatcher selects by.

    Strings are lower-cased and dtypes take their short names, so equal formats compare equal.

    Attributes:
        format: Number format of the weight, such as ``bf16``, ``fp8_e4m3``, ``int8``.
        layout: Arrangement in memory, such as ``convrot``; None for plain row-major.
        block_shape: ``(N block, K block)`` of block scales.
        scale_dtype: Dtype of the weight scales.
        granularity: ``per_tensor``, ``per_channel`` or ``block``.
        storage_dtype: Dtype of the stored elements.
        fields: Further facts, sorted by name.
    """

    format: str
    layout: str | None = None
    block_shape: tuple[int, int] | None = None
    scale_dtype: str | None = None
    granularity: str | None = None
    storage_dtype: str | None = None
    fields: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        for name in ("format", "scale_dtype", "storage_dtype"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else dtype_name(value))
        for name in ("layout", "granularity"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else str(value).lower())
        pairs = [
            (str(key).lower(), value.lower() if isinstance(value, str) else value)
            for key, value in self.fields
        ]
        object.__setattr__(self, "fields", tuple(sorted(pairs)))


@dataclass(frozen=True, slots=True)
class LegSlice:
    """The part of one leg's checkpoint weight that a layer holds.

    Attributes:
        full_shape: ``(rows, columns)`` of the leg in the checkpoint.
        row_start: First row held; the leg's logical width says how many.
        column_start: First column held; the layer's K says how many.
    """

    full_shape: tuple[int, int]
    row_start: int = 0
    column_start: int = 0


@dataclass(frozen=True, slots=True)
class AllocationRequest:
    """What a layer asks a weight spec to allocate.

    Attributes:
        weight_shape: ``(N, K)`` that the layer holds: with tensor parallelism, of this rank.
        params_dtype: Dtype the layer computes in: fp32, fp16 or bf16.
        logical_widths: Rows of each fused leg in order; defaults to ``(N,)``.
        shard_ids: Id of each leg in order, such as ``("q", "k", "v")`` or ``(0, 1)``; defaults to
            ``(None,)``.
        device: Where to allocate; None is torch's default device.
        slices: Which part of each leg's checkpoint tensors the layer holds; defaults to all.
            Checkpoint tensors always arrive whole.

    Raises:
        QuantConfigError: The widths are not positive, do not sum to N, or do not pair with the
            ids; a slice does not lie inside its leg.
    """

    weight_shape: tuple[int, int]
    params_dtype: torch.dtype
    logical_widths: tuple[int, ...] = ()
    shard_ids: tuple[ShardId, ...] = (None,)
    device: torch.device | str | None = None
    slices: tuple[LegSlice, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight_shape", tuple(self.weight_shape))
        object.__setattr__(self, "shard_ids", tuple(self.shard_ids))
        widths = tuple(self.logical_widths) or (self.weight_shape[0],)
        object.__setattr__(self, "logical_widths", widths)
        if len(widths) != len(self.shard_ids) or len(set(self.shard_ids)) != len(widths):
            raise QuantConfigError(
                f"logical_widths {widths} and shard_ids {self.shard_ids} must pair one to one"
            )
        if any(width < 1 for width in widths) or sum(widths) != self.weight_shape[0]:
            raise QuantConfigError(
                f"logical_widths {widths} must be positive and sum to N = {self.weight_shape[0]}"
            )
        self._set_slices(widths)

    def _set_slices(self, widths: tuple[int, ...]) -> None:
        columns = self.weight_shape[1]
        slices = tuple(self.slices) or tuple(LegSlice((width, columns)) for width in widths)
        object.__setattr__(self, "slices", slices)
        if len(slices) != len(widths):
            raise QuantConfigError(f"{len(slices)} slices for {len(widths)} legs; give one each")
        for part, width in zip(slices, widths, strict=True):
            rows_fit = 0 <= part.row_start <= part.full_shape[0] - width
            if not rows_fit or not 0 <= part.column_start <= part.full_shape[1] - columns:
                raise QuantConfigError(
                    f"{part} does not hold {width} rows and {columns} columns of its leg"
                )


@dataclass(frozen=True, slots=True)
class ActivationView:
    """A quantized activation.

    Attributes:
        x: Codes ``[M, K]``, with M the product of the leading sizes of the activation.
        x_scale: fp32 multipliers: ``[1]`` per tensor, ``[M]`` per token, or ``[M, ceil(K/g)]`` for
            groups of g along K.
        granularity: Which of these it is.
        x_zero_point: Codes that stand for 0, in the shape of ``x_scale``; None stands for 0.
    """

    x: torch.Tensor
    x_scale: torch.Tensor
    granularity: Granularity
    x_zero_point: torch.Tensor | None = None


class WeightSpec(Protocol):
    """How the weight of one linear layer is stored, loaded and read back.

    `allocate` comes first; `load_weight` once per checkpoint tensor; `process_after_loading` when
    all have arrived. The spec holds no state: everything lives on the layer.
    """

    @property
    def spec_id(self) -> str:
        """Stable id of the format, used in messages and in autotune keys."""
        ...

    @property
    def weight_dtype(self) -> torch.dtype | None:
        """Storage dtype; None when it follows the layer's ``params_dtype``."""
        ...

    @property
    def physical_signature(self) -> PhysicalSignature:
        """Facts for the kernel dispatcher."""
        ...

    def tensor_names(self) -> tuple[str, ...]:
        """Returns the checkpoint tensors of one unfused leg that `load_weight` accepts."""
        ...

    def allocate(self, layer: nn.Module, request: AllocationRequest) -> None:
        """Registers parameters (``requires_grad=False``) on the layer."""
        ...

    def load_weight(
        self, layer: nn.Module, name: str, loaded: torch.Tensor, shard_id: ShardId = None
    ) -> None:
        """Copies one checkpoint tensor of one leg into the layer's storage."""
        ...

    def process_after_loading(self, layer: nn.Module) -> None:
        """Brings the loaded tensors into the form that kernels read; a second call does nothing."""
        ...

    def dequantize_weight(self, layer: nn.Module) -> torch.Tensor:
        """Returns the weight ``[N, K]`` in fp32: the portable reference."""
        ...

    def missing_parts(self, layer: nn.Module) -> list[str]:
        """Returns the full names of legs and scales that were never loaded."""
        ...
