"""The linear of a prepared input with a given schedule, as an operator."""

from collections.abc import Sequence

import torch
from torch import Tensor

from piper_kernels._triton.targets import accelerator_target
from piper_kernels.linear.convrot.int8._plan import MatmulPlan
from piper_kernels.linear.convrot.int8._selection import supports_matmul
from piper_kernels.linear.convrot.int8.reference import linear_prepared

_GROUP_M = 8


@torch.library.custom_op(
    "piper_kernels::minimax_h3_vae_convrot_int8_linear_prepared", mutates_args=()
)
def scheduled_linear(
    input_qdata: Tensor,
    input_scale: Tensor,
    weight_qdata: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    logical_dtype: torch.dtype,
    schedule: Sequence[int],
) -> Tensor:
    """Return the linear of a prepared input in ``logical_dtype``, ``[..., N]``.

    Args:
        input_qdata: int8 ``[..., K]``.
        input_scale: FP32 ``[...]``.
        weight_qdata: int8 ``[N, K]``.
        weight_scale: FP32 ``[N, 1]``.
        bias: Floating ``[N]``, or ``None``.
        logical_dtype: Dtype of the result.
        schedule: Rows, columns and depth of a tile, warps, steps in flight. The result does not
            depend on it; devices without kernels ignore it.
    """
    if len(schedule) != 5 or min(schedule) < 1:
        raise ValueError(f"schedule must be five positive integers, got {list(schedule)}")
    target = accelerator_target(input_qdata.device)
    if input_qdata.numel() == 0 or target is None or not supports_matmul(target)[0]:
        return linear_prepared(
            input_qdata, input_scale, weight_qdata, weight_scale, logical_dtype, bias
        )
    from piper_kernels.linear.convrot.int8 import _launch

    block_m, block_n, block_k, num_warps, num_stages = schedule
    plan = MatmulPlan(block_m, block_n, block_k, num_warps, num_stages, _GROUP_M)
    columns, depth = weight_qdata.shape
    rows = input_qdata.reshape(-1, depth)
    out = torch.empty((rows.shape[0], columns), dtype=logical_dtype, device=rows.device)
    weight = (weight_qdata.contiguous(), weight_scale.contiguous(), bias)
    _launch.matmul(rows, input_scale.reshape(-1).contiguous(), weight, None, out, plan)
    return out.view(*input_qdata.shape[:-1], columns)


@scheduled_linear.register_fake
def _(
    input_qdata: Tensor,
    _input_scale: Tensor,
    weight_qdata: Tensor,
    _weight_scale: Tensor,
    _bias: Tensor | None,
    logical_dtype: torch.dtype,
    _schedule: Sequence[int],
) -> Tensor:
    return input_qdata.new_empty(
        (*input_qdata.shape[:-1], weight_qdata.shape[0]), dtype=logical_dtype
    )
