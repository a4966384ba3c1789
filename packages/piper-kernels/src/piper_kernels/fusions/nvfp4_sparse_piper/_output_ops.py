"""Custom operators of sparse Piper attention with an NVFP4 output projection.

With a static input scale the attention exists for windows of ``query_chunk_rows`` rows alone. A
dynamic one covers all rows: the attention exists as a whole and is packed and projected by chunks.
Gates of a coarse residual are given, or projected window by window. Fakes check host metadata.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from piper_kernels.fusions._ffn.nvfp4 import Projection
from piper_kernels.fusions._rows import require_rows
from piper_kernels.fusions.attention.convrot_int8 import GivenGates
from piper_kernels.fusions.attention.nvfp4 import (
    NVFP4Gates,
    NVFP4OutputLinear,
    project_with_one_scale,
)
from piper_kernels.fusions.attention.operators import (
    Argument,
    define_operator,
    optional,
    output_dtype,
)
from piper_kernels.fusions.attention.output import Gates
from piper_kernels.fusions.attention.windows import NVFP4_WINDOW_ROWS, balanced_windows
from piper_kernels.fusions.nvfp4_sparse_piper._operands import (
    LABEL,
    PackedInput,
    PackedProjection,
    check_packed,
)
from piper_kernels.fusions.sparse_piper.operands import (
    BRANCH_ARGUMENTS,
    KEY_VALUE_ARGUMENTS,
    QUERY_ARGUMENTS,
    check_attention,
    check_gate,
    check_queries,
    has_gates,
    prepared_queries,
    sparse_output,
)
from piper_kernels.fusions.sparse_piper.output import SparseOutput
from piper_kernels.weights.nvfp4._layout import SCALE_ROW_TILE

_GATE = tuple(
    optional("Tensor", f"gate_{name}")
    for name in (
        "input_qdata",
        "input_scale",
        "input_per_tensor_scale",
        "weight_qdata",
        "weight_scale",
        "weight_per_tensor_scale",
        "bias",
    )
)


def _output_arguments(*, rotated: bool) -> tuple[Argument, ...]:
    group = (Argument("SymInt", "group_size"),) if rotated else ()
    rows = NVFP4_WINDOW_ROWS
    return (
        Argument("Tensor", "weight_qdata"),
        Argument("Tensor", "weight_scale"),
        Argument("Tensor?", "weight_per_tensor_scale"),
        Argument("Tensor?", "activation_per_tensor_scale"),
        Argument("Tensor?", "bias"),
        Argument("bool", "dynamic_activation_scale"),
        *group,
        Argument("bool", "high_first", "False", False),
        Argument("SymInt", "query_chunk_rows", str(rows), rows),
    )


def _linear(bound: dict[str, Any]) -> Projection:
    return Projection(
        bound["weight_qdata"],
        bound["weight_scale"],
        bound["weight_per_tensor_scale"],
        bound["activation_per_tensor_scale"],
        bound["bias"],
        bound["dynamic_activation_scale"],
        bound["high_first"],
        bound.get("group_size", 0),
    )


def _projected_gates(bound: dict[str, Any], head_dim: int) -> NVFP4Gates:
    inputs = PackedInput(*(bound[argument.name] for argument in _GATE[:3]))
    qdata, scale, level, bias = (bound[argument.name] for argument in _GATE[3:])
    return NVFP4Gates(inputs, PackedProjection(qdata, scale, level, bias, head_dim))


def _check(bound: dict[str, Any]) -> tuple[int, int, int]:
    """Check all operands and return the shape of the result."""
    require_rows("query_chunk_rows", bound["query_chunk_rows"], SCALE_ROW_TILE)
    shape = check_attention(bound)
    check_queries(bound, shape)
    batch, rows, heads, features = shape
    key, linear = bound["key"], _linear(bound)
    outputs = linear.validate(heads * features, key.device)
    if linear.dynamic and batch != 1:
        raise ValueError(f"{LABEL}: a dynamic scale covers one sequence, got a batch of {batch}")
    if bound["coarse_gate"] is not None:
        check_gate(bound["coarse_gate"], shape, key.device)
    elif has_gates(bound):
        gates = _projected_gates(bound, features)
        found, _ = check_packed(gates.inputs, gates.projection)
        if batch != 1 or found != rows or gates.projection.heads != heads:
            raise ValueError(
                f"{LABEL}: gates are projected from one sequence of {rows} rows to {heads} heads, "
                f"got a batch of {batch}, {found} rows and {gates.projection.heads} heads"
            )
    return batch, rows, outputs


def _empty(bound: dict[str, Any]) -> Tensor:
    return bound["key"].new_empty(_check(bound), dtype=bound["output_dtype"])


def _gates(bound: dict[str, Any]) -> Gates | None:
    if not has_gates(bound):
        return None
    given = bound["coarse_gate"]
    if given is not None:
        return GivenGates(given)
    return _projected_gates(bound, bound["key"].shape[3])


def _run(bound: dict[str, Any]) -> Tensor:
    shape, rows = _check(bound), bound["query_chunk_rows"]
    linear = _linear(bound)
    attention = sparse_output(bound, prepared_queries(bound), _gates(bound))
    if linear.dynamic:
        return project_with_one_scale(_attend(attention, rows).flatten(2), linear, rows)
    projection = NVFP4OutputLinear(linear, linear.act_per_tensor_scale)
    output = bound["key"].new_empty(shape, dtype=bound["output_dtype"])
    return attention.project(projection, output, rows, SCALE_ROW_TILE)


def _attend(attention: SparseOutput, chunk_rows: int) -> Tensor:
    """Return the attention ``[1, rows, H, D]``; routes exist for windows of it alone."""
    heads, key = len(attention.request.units), attention.keys.key
    shape = (1, attention.rows, heads, key.shape[3])
    out = torch.empty(shape, dtype=attention.dtype, device=key.device)
    most = min(NVFP4_WINDOW_ROWS, chunk_rows)
    for window in balanced_windows(attention.rows, most, SCALE_ROW_TILE):
        room, gate = out[:, window], None
        if attention.coarse is not None:
            gates = attention.coarse.gates
            gate = gates.window(window, torch.empty_like(room) if gates.projected else None)
        attention.attend(window, room, gate)
    return out


def _define(name: str, *, rotated: bool) -> Callable[..., Any]:
    return define_operator(
        f"{name}_sparse_piper_attention_output",
        (
            *QUERY_ARGUMENTS,
            *KEY_VALUE_ARGUMENTS,
            *_output_arguments(rotated=rotated),
            *BRANCH_ARGUMENTS,
            *_GATE,
        ),
        (output_dtype(),),
        _empty,
        _run,
    )


attention_output = _define("nvfp4", rotated=False)
rotated_attention_output = _define("convrot_nvfp4", rotated=True)
