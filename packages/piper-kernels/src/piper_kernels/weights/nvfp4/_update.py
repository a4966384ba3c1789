"""Entry points of the in-place updates: metadata checks, no-op rules, backend choice."""

from typing import Any

from torch import Tensor

from piper_kernels.stochastic_quantization._seed import signed_seed, validate_seed
from piper_kernels.weights._update import validate_operands, validate_scalar
from piper_kernels.weights.nvfp4 import _backend, _update_reference
from piper_kernels.weights.nvfp4._storage import validate_update_storage


def add_(weight: Any, other: object, *, alpha: object, rounding_seed: int | None) -> None:
    """Add ``alpha * other`` to a weight; ``alpha == 0`` writes nothing."""
    operation = f"{_format_name(weight)} add_"
    rows, features = _require_updatable(operation, weight)
    (update,) = validate_operands(
        operation,
        {"other": (other, (rows, features))},
        logical_dtype=weight.dtype,
        scale=weight.scale,
    )
    factor = validate_scalar("alpha", alpha)
    seed = _narrow_seed(rounding_seed)
    if factor == 0:
        return
    _implementation(weight).add_(
        weight.qdata,
        weight.scale,
        weight.per_tensor_scale,
        update.detach(),
        _group_size(weight),
        factor,
        weight.is_swizzled_scales,
        weight.high_first,
        seed,
    )


def addmm_(
    weight: Any,
    mat1: object,
    mat2: object,
    *,
    beta: object,
    alpha: object,
    rounding_seed: int | None,
) -> None:
    """Set a weight to ``beta * W + alpha * mat1 @ mat2``.

    ``beta == 1`` with ``alpha == 0`` writes nothing.
    """
    operation = f"{_format_name(weight)} addmm_"
    rows, features = _require_updatable(operation, weight)
    rank = mat1.shape[1] if isinstance(mat1, Tensor) and mat1.ndim == 2 else None
    left, right = validate_operands(
        operation,
        {"mat1": (mat1, (rows, None)), "mat2": (mat2, (rank, features))},
        logical_dtype=weight.dtype,
        scale=weight.scale,
    )
    base_factor = validate_scalar("beta", beta)
    factor = validate_scalar("alpha", alpha)
    seed = _narrow_seed(rounding_seed)
    if base_factor == 1 and factor == 0:
        return
    _implementation(weight).addmm_(
        weight.qdata,
        weight.scale,
        weight.per_tensor_scale,
        left.detach(),
        right.detach(),
        _group_size(weight),
        base_factor,
        factor,
        weight.is_swizzled_scales,
        weight.high_first,
        seed,
    )


def _implementation(weight: Any) -> Any:
    return _backend.select(weight.device) or _update_reference


def _format_name(weight: Any) -> str:
    return "ConvRot NVFP4" if _group_size(weight) else "NVFP4"


def _group_size(weight: Any) -> int:
    """Return the rotation group of a weight; 0 stands for no rotation."""
    return getattr(weight, "group_size", 0)


def _require_updatable(operation: str, weight: Any) -> tuple[int, int]:
    if weight.transposed or weight.ndim != 2:
        raise NotImplementedError(
            f"{operation} needs an untransposed 2-D weight, got shape {tuple(weight.shape)} "
            f"with transposed={weight.transposed}"
        )
    return validate_update_storage(
        operation,
        weight.qdata,
        weight.scale,
        weight.per_tensor_scale,
        weight.block_size,
        swizzled=weight.is_swizzled_scales,
    )


def _narrow_seed(rounding_seed: int | None) -> int | None:
    if rounding_seed is None:
        return None
    validate_seed(rounding_seed)
    return signed_seed(rounding_seed)
