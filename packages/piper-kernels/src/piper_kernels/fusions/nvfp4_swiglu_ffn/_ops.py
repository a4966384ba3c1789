"""Custom operators of SwiGLU networks of NVFP4 linears."""

import torch
from torch import Tensor

from piper_kernels.fusions._ffn.gated_updates import GatedUpdates
from piper_kernels.fusions._ffn.nvfp4 import Projection, run_chunked_ffn, validate_ffn


@torch.library.custom_op("piper_kernels::nvfp4_swiglu_ffn", mutates_args=())
def swiglu_ffn(
    input: Tensor,  # noqa: A002  # the name of F.linear
    gate_weight_qdata: Tensor,
    gate_weight_scale: Tensor,
    gate_weight_per_tensor_scale: Tensor | None,
    gate_activation_per_tensor_scale: Tensor | None,
    gate_bias: Tensor | None,
    gate_dynamic_activation_scale: bool,
    gate_high_first: bool,
    value_weight_qdata: Tensor,
    value_weight_scale: Tensor,
    value_weight_per_tensor_scale: Tensor | None,
    value_activation_per_tensor_scale: Tensor | None,
    value_bias: Tensor | None,
    value_dynamic_activation_scale: bool,
    value_high_first: bool,
    down_weight_qdata: Tensor,
    down_weight_scale: Tensor,
    down_weight_per_tensor_scale: Tensor | None,
    down_activation_per_tensor_scale: Tensor | None,
    down_bias: Tensor | None,
    down_dynamic_activation_scale: bool,
    down_high_first: bool,
    chunk_rows: int,
) -> Tensor:
    """Return ``down(silu(gate(input)) * value(input))`` in the dtype of the input."""
    gate = Projection(
        gate_weight_qdata,
        gate_weight_scale,
        gate_weight_per_tensor_scale,
        gate_activation_per_tensor_scale,
        gate_bias,
        gate_dynamic_activation_scale,
        gate_high_first,
    )
    value = Projection(
        value_weight_qdata,
        value_weight_scale,
        value_weight_per_tensor_scale,
        value_activation_per_tensor_scale,
        value_bias,
        value_dynamic_activation_scale,
        value_high_first,
    )
    down = Projection(
        down_weight_qdata,
        down_weight_scale,
        down_weight_per_tensor_scale,
        down_activation_per_tensor_scale,
        down_bias,
        down_dynamic_activation_scale,
        down_high_first,
    )
    return run_chunked_ffn(input, (value, gate), down, "swiglu", chunk_rows)


@swiglu_ffn.register_fake
def _(
    input: Tensor,  # noqa: A002
    gate_weight_qdata: Tensor,
    gate_weight_scale: Tensor,
    gate_weight_per_tensor_scale: Tensor | None,
    gate_activation_per_tensor_scale: Tensor | None,
    gate_bias: Tensor | None,
    gate_dynamic_activation_scale: bool,
    gate_high_first: bool,
    value_weight_qdata: Tensor,
    value_weight_scale: Tensor,
    value_weight_per_tensor_scale: Tensor | None,
    value_activation_per_tensor_scale: Tensor | None,
    value_bias: Tensor | None,
    value_dynamic_activation_scale: bool,
    value_high_first: bool,
    down_weight_qdata: Tensor,
    down_weight_scale: Tensor,
    down_weight_per_tensor_scale: Tensor | None,
    down_activation_per_tensor_scale: Tensor | None,
    down_bias: Tensor | None,
    down_dynamic_activation_scale: bool,
    down_high_first: bool,
    chunk_rows: int,
) -> Tensor:
    gate = Projection(
        gate_weight_qdata,
        gate_weight_scale,
        gate_weight_per_tensor_scale,
        gate_activation_per_tensor_scale,
        gate_bias,
        gate_dynamic_activation_scale,
        gate_high_first,
    )
    value = Projection(
        value_weight_qdata,
        value_weight_scale,
        value_weight_per_tensor_scale,
        value_activation_per_tensor_scale,
        value_bias,
        value_dynamic_activation_scale,
        value_high_first,
    )
    down = Projection(
        down_weight_qdata,
        down_weight_scale,
        down_weight_per_tensor_scale,
        down_activation_per_tensor_scale,
        down_bias,
        down_dynamic_activation_scale,
        down_high_first,
    )
    outputs = validate_ffn(input, (value, gate), down, "swiglu", chunk_rows)
    return input.new_empty((*input.shape[:-1], outputs))


@torch.library.custom_op(
    "piper_kernels::nvfp4_swiglu_ffn_gated_updates_", mutates_args=("reusable_update",)
)
def swiglu_ffn_gated_updates_(
    input: Tensor,  # noqa: A002
    gate_weight_qdata: Tensor,
    gate_weight_scale: Tensor,
    gate_weight_per_tensor_scale: Tensor | None,
    gate_activation_per_tensor_scale: Tensor | None,
    gate_bias: Tensor | None,
    gate_dynamic_activation_scale: bool,
    gate_high_first: bool,
    value_weight_qdata: Tensor,
    value_weight_scale: Tensor,
    value_weight_per_tensor_scale: Tensor | None,
    value_activation_per_tensor_scale: Tensor | None,
    value_bias: Tensor | None,
    value_dynamic_activation_scale: bool,
    value_high_first: bool,
    down_weight_qdata: Tensor,
    down_weight_scale: Tensor,
    down_weight_per_tensor_scale: Tensor | None,
    down_activation_per_tensor_scale: Tensor | None,
    down_bias: Tensor | None,
    down_dynamic_activation_scale: bool,
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
    gate = Projection(
        gate_weight_qdata,
        gate_weight_scale,
        gate_weight_per_tensor_scale,
        gate_activation_per_tensor_scale,
        gate_bias,
        gate_dynamic_activation_scale,
        gate_high_first,
    )
    value = Projection(
        value_weight_qdata,
        value_weight_scale,
        value_weight_per_tensor_scale,
        value_activation_per_tensor_scale,
        value_bias,
        value_dynamic_activation_scale,
        value_high_first,
    )
    down = Projection(
        down_weight_qdata,
        down_weight_scale,
        down_weight_per_tensor_scale,
        down_activation_per_tensor_scale,
        down_bias,
        down_dynamic_activation_scale,
        down_high_first,
    )
    updates = GatedUpdates(
        base, reusable_update, update_gate, ffn_gate, gate_indices, python_indexing
    )
    run_chunked_ffn(input, (value, gate), down, "swiglu", chunk_rows, gated_updates=updates)
