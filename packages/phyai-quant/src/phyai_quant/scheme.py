"""What a tensor is quantized to: logical types without storage, kernels or devices."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

ROTATION_GROUPS = (16, 64, 256)
"""Lengths of the regular Hadamard rotation that ConvRot applies along K."""


class QuantConfigError(ValueError):
    """A quantization config, policy section or checkpoint tensor that cannot be honoured."""


class QDType(StrEnum):
    """Logical number format of a tensor; the storage dtype is the weight spec's business."""

    BF16 = "bf16"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    INT8 = "int8"
    INT4 = "int4"
    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"


class Granularity(StrEnum):
    """How many elements share one scale.

    On a weight ``[N, K]`` ``per_channel`` means one scale per output row; on an activation it means
    one scale per token row. A group of ``g`` elements along K is ``block`` with
    ``block_shape=(1, g)``.
    """

    PER_TENSOR = "per_tensor"
    PER_CHANNEL = "per_channel"
    BLOCK = "block"


@dataclass(frozen=True, slots=True)
class TensorQuant:
    """Quantization of one tensor.

    Attributes:
        dtype: Logical number format.
        granularity: Which elements share a scale.
        symmetric: False when the tensor has a zero point.
        dynamic: True when the scale is computed at run time from the values.
        micro_scaled: True when the block scales are themselves low precision (nvfp4: e4m3 and a
            global fp32 scale; mxfp4 and mxfp8: e8m0).
        block_shape: ``(N block, K block)``, exactly when granularity is ``block``.
        rotation_group: Length of the ConvRot rotation along K, for int8 per-channel weights and
            nvfp4 weights.
        act_order: True when the groups follow a permutation of K (a ``g_idx`` tensor).
        swizzled_scales: True when the checkpoint stores the block scales of an nvfp4 weight in
            tiles of 128 x 4 instead of row by row.

    Raises:
        QuantConfigError: The fields contradict each other.
    """

    dtype: QDType
    granularity: Granularity
    symmetric: bool = True
    dynamic: bool = False
    micro_scaled: bool = False
    block_shape: tuple[int, int] | None = None
    rotation_group: int | None = None
    act_order: bool = False
    swizzled_scales: bool = False

    def __post_init__(self) -> None:
        for name, kind in (("dtype", QDType), ("granularity", Granularity)):
            value = getattr(self, name)
            if value not in list(kind):
                raise QuantConfigError(
                    f"{name} {value!r} is not supported; allowed: {', '.join(kind)}"
                )
            object.__setattr__(self, name, kind(value))
        if (self.granularity is Granularity.BLOCK) != (self.block_shape is not None):
            raise QuantConfigError(
                f"granularity {self.granularity.value!r} and block_shape {self.block_shape} "
                "contradict: block_shape is given exactly when granularity is 'block'"
            )
        if self.block_shape is not None and (
            len(self.block_shape) != 2 or any(size < 1 for size in self.block_shape)
        ):
            raise QuantConfigError(
                f"block_shape {self.block_shape} must be two positive sizes (N block, K block)"
            )
        if self.rotation_group is not None:
            self._check_rotation()
        if self.swizzled_scales and self.dtype is not QDType.NVFP4:
            raise QuantConfigError(
                f"swizzled_scales needs dtype 'nvfp4', not {self.dtype.value!r}; other formats "
                "store scales row by row"
            )

    def _check_rotation(self) -> None:
        if self.rotation_group not in ROTATION_GROUPS:
            raise QuantConfigError(
                f"rotation_group {self.rotation_group} is not supported; "
                f"allowed: {', '.join(map(str, ROTATION_GROUPS))}"
            )
        int8_rows = self.dtype is QDType.INT8 and self.granularity is Granularity.PER_CHANNEL
        nvfp4_blocks = self.dtype is QDType.NVFP4 and self.block_shape == (1, 16)
        if not int8_rows and not nvfp4_blocks:
            raise QuantConfigError(
                f"rotation_group {self.rotation_group} needs dtype 'int8' and granularity "
                "'per_channel', or dtype 'nvfp4' and block_shape (1, 16), not "
                f"{self.dtype.value!r} and {self.granularity.value!r} with block_shape "
                f"{self.block_shape}"
            )

    def describe(self) -> str:
        """Returns a short text such as ``int4 block[1,128]``."""
        text = f"{self.dtype.value} {self.granularity.value}"
        if self.block_shape is not None:
            text += f"[{self.block_shape[0]},{self.block_shape[1]}]"
        flags = {
            "asymmetric": not self.symmetric,
            "dynamic": self.dynamic,
            "micro-scaled": self.micro_scaled,
            "act-order": self.act_order,
            f"rotated by {self.rotation_group}": self.rotation_group is not None,
            "swizzled": self.swizzled_scales,
        }
        return " ".join([text, *(name for name, on in flags.items() if on)])

    def as_dict(self) -> dict[str, Any]:
        """Returns a JSON-able mapping of every field."""
        return {
            "dtype": self.dtype.value,
            "granularity": self.granularity.value,
            "symmetric": self.symmetric,
            "dynamic": self.dynamic,
            "micro_scaled": self.micro_scaled,
            "block_shape": list(self.block_shape) if self.block_shape else None,
            "rotation_group": self.rotation_group,
            "act_order": self.act_order,
            "swizzled_scales": self.swizzled_scales,
        }


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """Quantization of one linear layer.

    Attributes:
        weight: Quantization of the weight ``[N, K]``.
        input: Quantization of the activation ``[..., K]``; None keeps it in 16 or 32 bits.
        online: True when the checkpoint holds high-precision weights that are quantized while they
            are loaded; False when the checkpoint already holds quantized tensors.
        stored_by: Name of the installed weight format, in the entry-point group
            ``phyai_quant.specs``, that reads the tensors; None is a format of this package.
    """

    weight: TensorQuant
    input: TensorQuant | None = None
    online: bool = False
    stored_by: str | None = None

    @property
    def weight_only(self) -> bool:
        """True when activations are not quantized."""
        return self.input is None

    def describe(self) -> str:
        """Returns a short text naming weight, input and when quantization happens."""
        activation = "unquantized" if self.input is None else self.input.describe()
        when = "quantized at load" if self.online else "quantized on disk"
        reader = "" if self.stored_by is None else f", stored by {self.stored_by}"
        return f"weight {self.weight.describe()}, input {activation}, {when}{reader}"

    def as_dict(self) -> dict[str, Any]:
        """Returns a JSON-able mapping of every field; ``stored_by`` only where it is set."""
        data = {
            "weight": self.weight.as_dict(),
            "input": None if self.input is None else self.input.as_dict(),
            "online": self.online,
        }
        return data if self.stored_by is None else {**data, "stored_by": self.stored_by}
