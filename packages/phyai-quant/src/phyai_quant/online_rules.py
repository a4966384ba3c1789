"""Which schemes can be quantized while a high-precision checkpoint is loaded."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from phyai_quant.scheme import Granularity, QDType, QuantConfigError, QuantScheme, TensorQuant

_PAIRS: dict[QDType, tuple[QDType | None, ...]] = {
    QDType.INT4: (None, QDType.INT8, QDType.FP8_E4M3),
    QDType.INT8: (None, QDType.INT8),
    QDType.FP8_E4M3: (None, QDType.FP8_E4M3),
    QDType.FP8_E5M2: (None, QDType.FP8_E5M2),
    QDType.NVFP4: (None, QDType.NVFP4),
    QDType.MXFP4: (None,),
}
_FP8 = (QDType.FP8_E4M3, QDType.FP8_E5M2)

WEIGHT_DTYPES = tuple(dtype for dtype in QDType if dtype in _PAIRS)
"""Formats that a weight can be quantized to at load."""

INPUT_DTYPES = tuple(dict.fromkeys(act for acts in _PAIRS.values() for act in acts if act))
"""Formats of an input that some weight quantized at load takes."""

MICRO_BLOCKS: dict[QDType, tuple[int, int]] = {QDType.NVFP4: (1, 16), QDType.MXFP4: (1, 32)}
"""Block shapes that micro-scaled 4-bit formats define."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A field of a scheme that no online format allows.

    Attributes:
        field: Dotted name of the field, such as ``weight.block_shape``.
        value: What it holds.
        allowed: What it may hold.
    """

    field: str
    value: object
    allowed: str

    def __str__(self) -> str:
        return f"{self.field} is {self.value}; allowed: {self.allowed}"


def find_violation(scheme: QuantScheme) -> Violation | None:
    """Returns the first field that makes the scheme impossible to quantize at load, or None."""
    return next(_violations(scheme), None)


def check_online_scheme(scheme: QuantScheme) -> None:
    """Raises QuantConfigError naming field, value and allowed values of an impossible scheme."""
    violation = find_violation(scheme)
    if violation is not None:
        raise QuantConfigError(f"cannot quantize at load ({scheme.describe()}): {violation}")


def minimum_sm(scheme: QuantScheme) -> int:
    """Returns the lowest NVIDIA SM version, as 80 for 8.0, that runs the scheme in bf16."""
    return 89 if scheme.input is not None and scheme.input.dtype in _FP8 else 80


def _violations(scheme: QuantScheme) -> Iterator[Violation]:
    weight = scheme.weight
    if weight.dtype not in _PAIRS:
        yield Violation("weight.dtype", weight.dtype.value, _join(_PAIRS))
        return
    if not weight.symmetric:
        yield Violation("weight.symmetric", False, "true")
    if weight.dynamic:
        yield Violation("weight.dynamic", True, "false")
    if weight.act_order:
        yield Violation("weight.act_order", True, "false")
    if weight.swizzled_scales:
        yield Violation("weight.swizzled_scales", True, "false; nothing is stored yet")
    micro = weight.dtype in MICRO_BLOCKS
    if weight.micro_scaled is not micro:
        yield Violation(
            "weight.micro_scaled", weight.micro_scaled, f"{micro} for {weight.dtype.value}".lower()
        )
    if weight.rotation_group is None:
        yield from _activation_violations(weight, scheme.input)
    else:
        yield from _convrot_violations(weight, scheme.input)
    yield from _block_violations(weight, scheme.input)


def _activation_violations(weight: TensorQuant, act: TensorQuant | None) -> Iterator[Violation]:
    allowed = _PAIRS[weight.dtype]
    if (None if act is None else act.dtype) not in allowed:
        names = _join(dtype for dtype in allowed if dtype is not None)
        yield Violation(
            "input.dtype",
            act.dtype.value if act is not None else None,
            f"no input{' or ' + names if names else ''} with weight.dtype {weight.dtype.value}",
        )
    if act is not None:
        yield from _input_violations(act)


def _convrot_violations(weight: TensorQuant, act: TensorQuant | None) -> Iterator[Violation]:
    seen = None if act is None else act.dtype
    allowed = {QDType.INT8} if weight.dtype is QDType.INT8 else {None, QDType.NVFP4}
    if seen not in allowed:
        names = "int8" if weight.dtype is QDType.INT8 else "no input or nvfp4"
        yield Violation(
            "input.dtype",
            None if seen is None else seen.value,
            f"{names} with weight.rotation_group {weight.rotation_group} on {weight.dtype.value}",
        )
        return
    if act is not None:
        yield from _input_violations(act)


def _input_violations(act: TensorQuant) -> Iterator[Violation]:
    if act.dtype in MICRO_BLOCKS:
        yield from _micro_input_violations(act, MICRO_BLOCKS[act.dtype])
    else:
        yield from _token_violations(act)
    if not act.symmetric:
        yield Violation("input.symmetric", False, "true")
    if not act.dynamic:
        yield Violation("input.dynamic", False, "true")
    if act.rotation_group is not None:
        yield Violation("input.rotation_group", act.rotation_group, "none; it follows the weight")


def _micro_input_violations(act: TensorQuant, block: tuple[int, int]) -> Iterator[Violation]:
    if act.block_shape != block:
        yield Violation(
            "input.block_shape", act.block_shape, f"{list(block)} for {act.dtype.value}"
        )
    if not act.micro_scaled:
        yield Violation("input.micro_scaled", False, f"true for {act.dtype.value}")


def _token_violations(act: TensorQuant) -> Iterator[Violation]:
    if act.granularity is not Granularity.PER_CHANNEL:
        yield Violation("input.granularity", act.granularity.value, "per_channel (one per token)")
    if act.micro_scaled:
        yield Violation("input.micro_scaled", True, "false")


def _block_violations(weight: TensorQuant, act: TensorQuant | None) -> Iterator[Violation]:
    required = MICRO_BLOCKS.get(weight.dtype)
    if required is not None:
        if weight.block_shape != required:
            yield Violation(
                "weight.block_shape",
                weight.block_shape,
                f"{list(required)} for {weight.dtype.value}",
            )
        return
    if weight.block_shape is None:
        return
    block_n, block_k = weight.block_shape
    if block_n != 1 and not (weight.dtype in _FP8 and block_n >= 64 and _is_power_of_two(block_n)):
        allowed = "1 or a power of two from 64" if weight.dtype in _FP8 else "1"
        yield Violation("weight.block_shape[0]", block_n, f"{allowed} for {weight.dtype.value}")
    floor = 16 if act is None else 32
    if block_k < floor or not _is_power_of_two(block_k):
        kind = "an unquantized" if act is None else f"an {act.dtype.value}"
        yield Violation(
            "weight.block_shape[1]", block_k, f"a power of two from {floor} with {kind} input"
        )


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def _join(dtypes: Iterable[QDType]) -> str:
    return ", ".join(dtype.value for dtype in dtypes)
