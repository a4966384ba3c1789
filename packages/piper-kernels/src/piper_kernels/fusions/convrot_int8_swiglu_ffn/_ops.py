"""Custom operators of SwiGLU networks of ConvRot INT8 linears."""

import torch
from torch import Tensor

from piper_kernels.fusions._ffn.convrot_int8 import Projection, run_chunked_ffn, validate_ffn
from piper_kernels.fusions._ffn.gated_updates import GatedUpdates


@torch.library.custom_op("piper_kernels::convrot_int8_swiglu_ffn", mutates_args=())
def swiglu_ffn(
    input: Tensor,  # noqa: A002  # the name of F.linear
    gate_weight_qdata: Tensor,
    gate_weight_scale: Tensor,
    gate_bias: Tensor | None,
    gate_group_size: int,
    value_weight_qdata: Tensor,
    value_weight_scale: Tensor,
    value_bias: Tensor | None,
    value_group_size: int,
    down_weight_qdata: Tensor,
    down_weight_scale: Tensor,
    down_bias: Tensor | None,
    down_group_size: int,
    chunk_rows: int,
    gate_input_scale: Tensor | None = None,
    value_input_scale: Tensor | None = None,
    down_input_scale: Tensor | None = None,
) -> Tensor:
    """Return ``down(silu(gate(input)) * value(input))`` in the dtype of the input."""
    gate = Projection(
        gate_weight_qdata, gate_weight_scale, gate_bias, gate_group_size, gate_input_scale
    )
    value = Projection(
        value_weight_qdata, value_weight_scale, value_bias, value_group_size, value_input_scale
    )
    down = Projection(
        down_weight_qdata, down_weight_scale, down_bias, down_group_size, down_input_scale
    )
    return run_chunked_ffn(input, (value, gate), down, "swiglu", chunk_rows)


@swiglu_ffn.register_fake
def _(
    input: Tensor,  # noqa: A002
    gate_weight_qdata: Tensor,
    gate_weight_scale: Tensor,
    gate_bias: Tensor | None,
    gate_group_size: int,
    value_weight_qdata: Tensor,
    value_weight_scale: Tensor,
    value_bias: Tensor | None,
    value_group_size: int,
    down_weight_qdata: Tensor,
    down_weight_scale: Tensor,
    down_bias: Tensor | None,
    down_group_size: int,
    chunk_rows: int,
    gate_input_scale: Tensor | None = None,
    value_input_scale: Tensor | None = None,
    down_input_scale: Tensor | None = None,
) -> Tensor:
    gate = Projection(
        gate_weight_qdata, gate_weight_scale, gate_bias, gate_group_size, gate_input_scale
    )
    value = Projection(
        value_weight_qdata, value_weight_scale, value_bias, value_group_size, value_input_scale
    )
    down = Projection(
        down_weight_qdata, down_weight_scale, down_bias, down_group_size, down_input_scale
    )
    validate_ffn(input, (value, gate), down, "swiglu", chunk_rows)
    return input.new_empty((*input.shape[:-1], down_weight_qdata.shape[0]))


@torch.library.custom_op(
    "piper_kernels::convrot_int8_swiglu_ffn_gated_updates_", mutates_args=("reusable_update",)
)
def swiglu_ffn_gated_updates_(
    input: Tensor,  # noqa: A002
    gate_weight_qdata: Tensor,
    gate_weight_scale: Tensor,
    gate_bias: Tensor | None,
    gate_group_size: int,
    value_weight_qdata: Tensor,
    value_weight_scale: Tensor,
    value_bias: Tensor | None,
    value_group_size: int,
    down_weight_qdata: Tensor,
    down_weight_scale: Tensor,
    down_bias: Tensor | None,
    down_group_size: int,
    base: Tensor,
    reusable_update: Tensor,
    update_gate: Tensor,
    ffn_gate: Tensor,
    gate_indices: Tensor,
    python_indexing: bool,
    chunk_rows: int,
    gate_input_scale: Tensor | None = None,
    value_input_scale: Tensor | None = None,
    down_input_scale: Tensor | None = None,
) -> None:
    """Overwrite ``reusable_update`` by the gated update of the network's result."""
    gate = Projection(
        gate_weight_qdata, gate_weight_scale, gate_bias, gate_group_size, gate_input_scale
    )
    value = Projection(
        value_weight_qdata, value_weight_scale, value_bias, value_group_size, value_input_scale
    )
    down = Projection(
        down_weight_qdata, down_weight_scale, down_bias, down_group_size, down_input_scale
    )
    updates = GatedUpdates(
        base, reusable_update, update_gate, ffn_gate, gate_indices, python_indexing
    )
    run_chunked_ffn(input, (value, gate), down, "swiglu", chunk_rows, gated_updates=updates)
