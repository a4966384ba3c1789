"""Custom operators of GELU networks of ConvRot INT8 linears."""

import torch
from torch import Tensor

from piper_kernels.fusions._ffn.convrot_int8 import Projection, run_chunked_ffn, validate_ffn
from piper_kernels.fusions._ffn.gated_updates import GatedUpdates


@torch.library.custom_op("piper_kernels::convrot_int8_gelu_ffn", mutates_args=())
def gelu_ffn(
    input: Tensor,  # noqa: A002  # the name of F.linear
    up_weight_qdata: Tensor,
    up_weight_scale: Tensor,
    up_bias: Tensor | None,
    up_group_size: int,
    down_weight_qdata: Tensor,
    down_weight_scale: Tensor,
    down_bias: Tensor | None,
    down_group_size: int,
    chunk_rows: int,
    up_input_scale: Tensor | None = None,
    down_input_scale: Tensor | None = None,
) -> Tensor:
    """Return ``down(gelu(up(input), approximate="tanh"))`` in the dtype of the input."""
    up = Projection(up_weight_qdata, up_weight_scale, up_bias, up_group_size, up_input_scale)
    down = Projection(
        down_weight_qdata, down_weight_scale, down_bias, down_group_size, down_input_scale
    )
    return run_chunked_ffn(input, (up,), down, "gelu_tanh", chunk_rows)


@gelu_ffn.register_fake
def _(
    input: Tensor,  # noqa: A002
    up_weight_qdata: Tensor,
    up_weight_scale: Tensor,
    up_bias: Tensor | None,
    up_group_size: int,
    down_weight_qdata: Tensor,
    down_weight_scale: Tensor,
    down_bias: Tensor | None,
    down_group_size: int,
    chunk_rows: int,
    up_input_scale: Tensor | None = None,
    down_input_scale: Tensor | None = None,
) -> Tensor:
    up = Projection(up_weight_qdata, up_weight_scale, up_bias, up_group_size, up_input_scale)
    down = Projection(
        down_weight_qdata, down_weight_scale, down_bias, down_group_size, down_input_scale
    )
    validate_ffn(input, (up,), down, "gelu_tanh", chunk_rows)
    return input.new_empty((*input.shape[:-1], down_weight_qdata.shape[0]))


@torch.library.custom_op(
    "piper_kernels::convrot_int8_gelu_ffn_gated_updates_", mutates_args=("reusable_update",)
)
def gelu_ffn_gated_updates_(
    input: Tensor,  # noqa: A002
    up_weight_qdata: Tensor,
    up_weight_scale: Tensor,
    up_bias: Tensor | None,
    up_group_size: int,
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
    up_input_scale: Tensor | None = None,
    down_input_scale: Tensor | None = None,
) -> None:
    """Overwrite ``reusable_update`` by the gated update of the network's result."""
    up = Projection(up_weight_qdata, up_weight_scale, up_bias, up_group_size, up_input_scale)
    down = Projection(
        down_weight_qdata, down_weight_scale, down_bias, down_group_size, down_input_scale
    )
    updates = GatedUpdates(
        base, reusable_update, update_gate, ffn_gate, gate_indices, python_indexing
    )
    run_chunked_ffn(input, (up,), down, "gelu_tanh", chunk_rows, gated_updates=updates)
