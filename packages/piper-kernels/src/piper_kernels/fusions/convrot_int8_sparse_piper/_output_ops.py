"""Custom operators of sparse Piper attention with a ConvRot INT8 output projection.

The attention exists for windows of ``query_chunk_rows`` rows alone. Queries are given, or
projected window by window; so are the gates of a coarse residual. Fakes check host metadata.
"""

from typing import Any

from torch import Tensor

from piper_kernels.attention.sparse_piper_attention._blocks import BLOCK
from piper_kernels.fusions._ffn.convrot_int8 import Projection
from piper_kernels.fusions._rows import require_rows
from piper_kernels.fusions.attention.convrot_int8 import (
    GivenGates,
    Int8Gates,
    Int8OutputLinear,
    WindowedInput,
)
from piper_kernels.fusions.attention.operators import (
    Argument,
    define_operator,
    optional,
    output_dtype,
)
from piper_kernels.fusions.attention.output import Gates
from piper_kernels.fusions.attention.windows import SPARSE_WINDOW_ROWS
from piper_kernels.fusions.convrot_int8_sage_qk.operands import (
    HeadProjection,
    PreparedInput,
    check_projection,
    check_softmax_scale,
)
from piper_kernels.fusions.convrot_int8_sparse_piper._ops_operands import LABEL
from piper_kernels.fusions.convrot_int8_sparse_piper._queries import ProjectedQueries
from piper_kernels.fusions.projected_qk.transform import (
    HeadTransform,
    check_transform,
    resolve_head_dim,
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
    request_of,
    sparse_output,
)

_PROJECTED_QUERY = (
    Argument("Tensor", "query_input_qdata"),
    Argument("Tensor?", "query_input_scale"),
    Argument("Tensor", "query_weight_qdata"),
    Argument("Tensor", "query_weight_scale"),
    Argument("Tensor?", "norm_weight"),
    Argument("Tensor", "cos"),
    Argument("Tensor", "sin"),
    Argument("float", "eps"),
    Argument("float", "softmax_scale"),
)
_OUTPUT = (
    Argument("Tensor", "weight_qdata"),
    Argument("Tensor", "weight_scale"),
    Argument("Tensor?", "bias"),
    Argument("SymInt", "group_size"),
    Argument("SymInt", "query_chunk_rows", str(SPARSE_WINDOW_ROWS), SPARSE_WINDOW_ROWS),
)
_GATE = (
    optional("Tensor", "gate_input_qdata"),
    optional("Tensor", "gate_input_scale"),
    optional("Tensor", "gate_weight_qdata"),
    optional("Tensor", "gate_weight_scale"),
    optional("Tensor", "gate_bias"),
    optional("Tensor", "output_input_scale"),
)
_KEYWORDS = (output_dtype(), optional("SymInt", "input_group_size"))


def _output_linear(bound: dict[str, Any]) -> Projection:
    return Projection(
        bound["weight_qdata"],
        bound["weight_scale"],
        bound["bias"],
        bound["group_size"],
        bound["output_input_scale"],
    )


def _check_output(bound: dict[str, Any], shape: tuple[int, int, int, int]) -> tuple[int, int, int]:
    """Check the gates and the output projection and return the shape of the result."""
    require_rows("query_chunk_rows", bound["query_chunk_rows"], BLOCK)
    batch, rows, heads, features = shape
    key = bound["key"]
    _output_linear(bound).validate(heads * features, key.device)
    if bound["coarse_gate"] is not None:
        check_gate(bound["coarse_gate"], shape, key.device)
    elif has_gates(bound):
        gates = _projected_gates(bound)
        _check_input(gates.inputs, HeadProjection(gates.qdata, gates.scale, gates.bias, features),
                     shape)  # fmt: skip
    return batch, rows, bound["weight_qdata"].shape[0]


def _empty(bound: dict[str, Any], shape: tuple[int, int, int]) -> Tensor:
    return bound["key"].new_empty(shape, dtype=bound["output_dtype"])


def _check_input(
    inputs: WindowedInput, projection: HeadProjection, shape: tuple[int, int, int, int]
) -> None:
    """Check an input that is projected window by window to heads of the attention."""
    batch, rows, heads, _ = shape
    found = inputs.validate(LABEL, projection.qdata.device)
    if found[:2] != (batch, rows) or projection.heads != heads:
        raise ValueError(
            f"{LABEL}: windows are projected from [{batch}, {rows}] rows to {heads} heads, "
            f"got rows {list(found[:2])} and {projection.heads} heads"
        )
    if inputs.scale is not None and inputs.scale.ndim:
        check_projection(LABEL, PreparedInput(inputs.values, inputs.scale), projection)


def _projected_gates(bound: dict[str, Any]) -> Int8Gates:
    inputs = WindowedInput(
        bound["gate_input_qdata"], bound["gate_input_scale"], bound["input_group_size"]
    )
    weight = (bound["gate_weight_qdata"], bound["gate_weight_scale"], bound["gate_bias"])
    return Int8Gates(inputs, *weight)


def _gates(bound: dict[str, Any]) -> Gates | None:
    if not has_gates(bound):
        return None
    given = bound["coarse_gate"]
    return _projected_gates(bound) if given is None else GivenGates(given)


def _check_given(bound: dict[str, Any]) -> tuple[int, int, int]:
    shape = check_attention(bound)
    check_queries(bound, shape)
    return _check_output(bound, shape)


def _run_given(bound: dict[str, Any]) -> Tensor:
    output = _empty(bound, _check_given(bound))
    attention = sparse_output(bound, prepared_queries(bound), _gates(bound))
    linear = Int8OutputLinear(_output_linear(bound))
    return attention.project(linear, output, bound["query_chunk_rows"])


def _queries(bound: dict[str, Any]) -> ProjectedQueries:
    width = resolve_head_dim(LABEL, bound["norm_weight"], bound["head_dim"])
    inputs = WindowedInput(
        bound["query_input_qdata"], bound["query_input_scale"], bound["input_group_size"]
    )
    weight = (bound["query_weight_qdata"], bound["query_weight_scale"], bound["query_bias"])
    return ProjectedQueries(
        inputs,
        HeadProjection(*weight, width),
        HeadTransform(bound["norm_weight"], bound["cos"], bound["sin"], bound["eps"]),
        bound["softmax_scale"],
        request_of(bound).mode,
        bound["block_lengths"],
    )


def _check_projected(bound: dict[str, Any]) -> tuple[int, int, int]:
    shape = check_attention(bound)
    queries, device = _queries(bound), bound["key"].device
    _check_input(queries.inputs, queries.projection, shape)
    check_transform(LABEL, queries.transform, shape[3], shape[1], device)
    check_softmax_scale(LABEL, queries.softmax_scale)
    return _check_output(bound, shape)


def _project_windows(bound: dict[str, Any], output: Tensor) -> Tensor:
    attention = sparse_output(bound, _queries(bound), _gates(bound))
    linear = Int8OutputLinear(_output_linear(bound))
    return attention.project(linear, output, bound["query_chunk_rows"])


def _run_projected(bound: dict[str, Any]) -> Tensor:
    return _project_windows(bound, _empty(bound, _check_projected(bound)))


def _check_reused(bound: dict[str, Any]) -> None:
    """Check all operands; ``ValueError`` unless the source has room for the result."""
    shape, dtype, device = _check_projected(bound), bound["output_dtype"], bound["key"].device
    source = bound["reusable_source"]
    fits = source.shape == shape and source.dtype == dtype and source.device == device
    if not fits or not source.is_contiguous():
        raise ValueError(
            f"{LABEL}: reusable_source must be contiguous {dtype} {shape} on {device}, got "
            f"{source.dtype} {tuple(source.shape)} with strides {source.stride()} on "
            f"{source.device}"
        )


def _run_reused(bound: dict[str, Any]) -> None:
    _check_reused(bound)
    # Queries and gates of a window are prepared before its rows are overwritten.
    _project_windows(bound, bound["reusable_source"])


attention_output = define_operator(
    "convrot_int8_sparse_piper_attention_output",
    (*QUERY_ARGUMENTS, *KEY_VALUE_ARGUMENTS, *_OUTPUT, *BRANCH_ARGUMENTS, *_GATE),
    _KEYWORDS,
    lambda bound: _empty(bound, _check_given(bound)),
    _run_given,
)
_PROJECTED_ARGUMENTS = (
    *_PROJECTED_QUERY,
    *KEY_VALUE_ARGUMENTS,
    *_OUTPUT,
    *BRANCH_ARGUMENTS,
    *_GATE,
    optional("Tensor", "query_bias"),
)
_PROJECTED_KEYWORDS = (*_KEYWORDS, optional("SymInt", "head_dim"))
_PROJECTED_NAME = "convrot_int8_sparse_piper_projected_query_attention_output"
projected_query_attention_output = define_operator(
    _PROJECTED_NAME,
    _PROJECTED_ARGUMENTS,
    _PROJECTED_KEYWORDS,
    lambda bound: _empty(bound, _check_projected(bound)),
    _run_projected,
)
projected_query_attention_output_ = define_operator(
    f"{_PROJECTED_NAME}_",
    (Argument("Tensor", "reusable_source"), *_PROJECTED_ARGUMENTS),
    _PROJECTED_KEYWORDS,
    _check_reused,
    _run_reused,
    0,
    mutates="reusable_source",
)
