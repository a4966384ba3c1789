"""Entry points of the in-place updates: metadata checks, no-op rules, choice of the code."""

import torch
from torch import Tensor

from piper_kernels.stochastic_quantization._seed import signed_seed, validate_seed
from piper_kernels.weights._update import validate_operands, validate_scalar
from piper_kernels.weights.convrot.int8 import _ops, _update_reference
from piper_kernels.weights.convrot.int8._backend import runs_in_operators
from piper_kernels.weights.convrot.int8._storage import validate_storage


def add_(
    qdata: Tensor,
    scale: Tensor,
    other: object,
    *,
    group_size: int,
    logical_dtype: torch.dtype,
    alpha: object,
    rounding_seed: int | None,
) -> None:
    """Add ``alpha * other`` to a weight; ``alpha == 0`` writes nothing."""
    operation = "ConvRot INT8 add_"
    out_features, in_features = _require_storage(operation, qdata, scale, group_size)
    (update,) = validate_operands(
        operation,
        {"other": (other, (out_features, in_features))},
        logical_dtype=logical_dtype,
        scale=scale,
    )
    factor = validate_scalar("alpha", alpha)
    seed = _narrow_seed(rounding_seed)
    if factor == 0:
        return
    run = _ops.add_ if runs_in_operators(qdata.device) else _update_reference.add_
    run(qdata, scale, update.detach(), group_size, factor, seed)


def addmm_(
    qdata: Tensor,
    scale: Tensor,
    mat1: object,
    mat2: object,
    *,
    group_size: int,
    logical_dtype: torch.dtype,
    beta: object,
    alpha: object,
    rounding_seed: int | None,
) -> None:
    """Set a weight to ``beta * W + alpha * mat1 @ mat2``.

    ``beta == 1`` with ``alpha == 0`` writes nothing.
    """
    operation = "ConvRot INT8 addmm_"
    out_features, in_features = _require_storage(operation, qdata, scale, group_size)
    rank = mat1.shape[1] if isinstance(mat1, Tensor) and mat1.ndim == 2 else None
    left, right = validate_operands(
        operation,
        {"mat1": (mat1, (out_features, None)), "mat2": (mat2, (rank, in_features))},
        logical_dtype=logical_dtype,
        scale=scale,
    )
    base_factor = validate_scalar("beta", beta)
    factor = validate_scalar("alpha", alpha)
    seed = _narrow_seed(rounding_seed)
    if base_factor == 1 and factor == 0:
        return
    run = _ops.addmm_ if runs_in_operators(qdata.device) else _update_reference.addmm_
    run(qdata, scale, left.detach(), right.detach(), group_size, base_factor, factor, seed)


def _require_storage(
    operation: str, qdata: Tensor, scale: Tensor, group_size: int
) -> tuple[int, int]:
    if qdata.ndim != 2:
        raise ValueError(f"{operation} requires 2-D qdata, got shape {tuple(qdata.shape)}")
    validate_storage(qdata, scale, group_size)
    return qdata.shape[0], qdata.shape[1]


def _narrow_seed(rounding_seed: int | None) -> int | None:
    if rounding_seed is None:
        return None
    validate_seed(rounding_seed)
    return signed_seed(rounding_seed)
