"""Custom operators of GELU networks of ConvRot NVFP4 linears.

A group size of 0 stands for a weight that is not rotated.
"""

import torch
from torch import Tensor

from piper_kernels.fusions._ffn.gated_updates import GatedUpdates
from piper_kernels.fusions._ffn.nvfp4 import Projection, run_chunked_ffn, validate_ffn


@torch.library.custom_op("piper_kernels::convrot_nvfp4_gelu_ffn", mutates_args=())
def gelu_ffn(
    input: Tensor,  # noqa: A002  # the name of F.linear
    up_weight_qdata: Tensor,
    up_weight_scale: Tensor,
    up_weight_per_tensor_scale: Tensor | None,
    up_activation_per_tensor_scale: Tensor | None,
    up_bias: Tensor | None,
    up_dynamic_activation_scale: bool,
    up_group_size: int,
    up_high_first: bool,
    down_weight_qdata: Tensor,
    down_weight_scale: Tensor,
    down_weight_per_tensor_scale: Tensor | None,
    down_activation_per_tensor_scale: Tensor | None,
    down_bias: Tensor | None,
    down_dynamic_activation_scale: bool,
    down_group_size: int,
    down_high_first: bool,
    chunk_rows: int,
) -> Tensor:
    """Return ``down(gelu(up(input), approximate="tanh"))`` in the dtype of the input."""
    up = Projection(
        up_weight_qdata,
        up_weight_scale,
        up_weight_per_tensor_scale,
        up_activation_per_tensor_scale,
        up_bias,
        up_dynamic_activation_scale,
        up_high_first,
        up_group_size,
    )
    down = Projection(
        down_weight_qdata,
        down_weight_scale,
        down_weight_per_tensor_scale,
        down_activation_per_tensor_scale,
        down_bias,
        down_dynamic_activation_scale,
        down_high_first,
        down_group_size,
    )
    return run_chunked_ffn(input, (up,), down, "gelu_tanh", chunk_rows)


@gelu_ffn.register_fake
def _(
    input: Tensor,  # noqa: A002
    up_weight_qdata: Tensor,
    up_weight_scale: Tensor,
    up_weight_per_tensor_scale: Tensor | None,
    up_activation_per_tensor_scale: Tensor | None,
    up_bias: Tensor | None,
    up_dynamic_activation_scale: bool,
    up_group_size: int,
    up_high_first: bool,
    down_weight_qdata: Tensor,
    down_weight_scale: Tensor,
    down_weight_per_tensor_scale: Tensor | None,
    down_activation_per_tensor_scale: Tensor | None,
    down_bias: Tensor | None,
    down_dynamic_activation_scale: bool,
    down_group_size: int,
    down_high_first: bool,
    chunk_rows: int,
) -> Tensor:
    up = Projection(
        up_weight_qdata,
        up_weight_scale,
        up_weight_per_tensor_scale,
        up_activation_per_tensor_scale,
        up_bias,
        up_dynamic_activation_scale,
        up_high_first,
        up_group_size,
    )
    down = Projection(
        down_weight_qdata,
        down_weight_scale,
        down_weight_per_tensor_scale,
        down_activation_per_tensor_scale,
        down_bias,
        down_dynamic_activation_scale,
        down_high_first,
        down_group_size,
    )
    outputs = validate_ffn(input, (up,), down, "gelu_tanh", chunk_rows)
    return input.new_empty((*input.shape[:-1], outputs))


@torch.library.custom_op(
    "piper_kernels::convrot_nvfp4_gelu_ffn_gated_updates_", mutates_args=("reusable_update",)
)
def gelu_ffn_gated_updates_(
    input: Tensor,  # noqa: A002
    up_weight_qdata: Tensor,
    up_weight_scale: Tensor,
    up_weight_per_tensor_scale: Tensor | None,
    up_activation_per_tensor_scale: Tensor | None,
    up_bias: Tensor | None,
    up_dynamic_activation_scale: bool,
    up_group_size: int,
    up_high_first: bool,
    down_weight_qdata: Tensor,
    down_weight_scale: Tensor,
    down_weight_per_tensor_scale: Tensor | None,
    down_activation_per_tensor_scale: Tensor | None,
    down_bias: Tensor | None,
    down_dynamic_activation_scale: bool,
    down_group_size: int,
    down_high_first: bool,
    base: Tensor,
    reusable_update: Tensor,
    update_gate: Tensor,
    ffn_gate: Tensor,
    gate_indices: Tensor,
    python_indexing: bool,
    chunk_rows: int,
) -> None:
    """Overwrite ``reusable_update`` by the gated update of the network's result."""
    up = Projection(
        up_weight_qdata,
        up_weight_scale,
        up_weight_per_tensor_scale,
        up_activation_per_tensor_scale,
        up_bias,
        up_dynamic_activation_scale,
        up_high_first,
        up_group_size,
    )
    down = Projection(
        down_weight_qdata,
        down_weight_scale,
        down_weight_per_tensor_scale,
        down_activation_per_tensor_scale,
        down_bias,
        down_dynamic_activation_scale,
        down_high_first,
        down_group_size,
    )
    updates = GatedUpdates(
        base, reusable_update, update_gate, ffn_gate, gate_indices, python_indexing
    )
    run_chunked_ffn(input, (up,), down, "gelu_tanh", chunk_rows, gated_updates=updates)
