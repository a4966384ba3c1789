"""The custom operator of dense Piper attention with projected queries and a projected result.

Queries and attention exist for windows of ``query_chunk_rows`` rows alone. Fakes check host
metadata.
"""

from typing import Any

import torch
from torch import Tensor

from piper_kernels._triton.targets import accelerator_target, sm_count
from piper_kernels.attention.piper_attention._backend import backend_for
from piper_kernels.attention.piper_attention._checks import check_key_value_storage, padded_rows
from piper_kernels.attention.piper_attention.prepared import PreparedKeyValue
from piper_kernels.fusions._ffn.convrot_int8 import Projection
from piper_kernels.fusions._rows import require_rows
from piper_kernels.fusions.attention.convrot_int8 import Int8OutputLinear
from piper_kernels.fusions.attention.operators import Argument, define_operator, optional
from piper_kernels.fusions.attention.output import WindowedOutput
from piper_kernels.fusions.attention.windows import (
    DENSE_WINDOW_ROWS,
    balanced_windows,
    wave_windows,
)
from piper_kernels.fusions.convrot_int8_piper._ops import LABEL
from piper_kernels.fusions.convrot_int8_sage_qk.operands import (
    HeadProjection,
    PreparedInput,
    check_projection,
    check_softmax_scale,
)
from piper_kernels.fusions.convrot_int8_sage_qk.projections import project_query
from piper_kernels.fusions.projected_qk.transform import (
    HeadTransform,
    check_transform,
    resolve_head_dim,
)

_ROW_TILE = 128
_PROGRAMS_PER_SM = 2
_ARGUMENTS = (
    Argument("Tensor", "input_qdata"),
    Argument("Tensor", "input_scale"),
    Argument("Tensor", "query_weight_qdata"),
    Argument("Tensor", "query_weight_scale"),
    Argument("Tensor?", "norm_weight"),
    Argument("Tensor", "cos"),
    Argument("Tensor", "sin"),
    Argument("float", "eps"),
    Argument("float", "softmax_scale"),
    Argument("Tensor?", "query_bias"),
    *(
        Argument("Tensor", name)
        for name in ("key", "key_scale", "value", "multiplier", "log_scale", "value_mean")
    ),
    Argument("SymInt", "key_length"),
    Argument("bool", "is_causal"),
    Argument("ScalarType", "output_dtype"),
    Argument("Tensor", "weight_qdata"),
    Argument("Tensor", "weight_scale"),
    Argument("Tensor?", "bias"),
    Argument("SymInt", "group_size"),
    optional("Tensor", "output_input_scale"),
)
_KEYWORDS = (
    optional("SymInt", "head_dim"),
    Argument("SymInt", "query_chunk_rows", str(DENSE_WINDOW_ROWS), DENSE_WINDOW_ROWS),
)


def _queries(bound: dict[str, Any]) -> tuple[PreparedInput, HeadProjection, HeadTransform]:
    """Return the checked operands of the queries."""
    width = resolve_head_dim(LABEL, bound["norm_weight"], bound["head_dim"])
    inputs = PreparedInput(bound["input_qdata"], bound["input_scale"])
    weight = (bound["query_weight_qdata"], bound["query_weight_scale"], bound["query_bias"])
    projection = HeadProjection(*weight, width)
    check_projection(LABEL, inputs, projection)
    transform = HeadTransform(bound["norm_weight"], bound["cos"], bound["sin"], bound["eps"])
    check_transform(LABEL, transform, width, inputs.qdata.shape[1], inputs.qdata.device)
    check_softmax_scale(LABEL, bound["softmax_scale"])
    return inputs, projection, transform


def _key_value(bound: dict[str, Any]) -> PreparedKeyValue:
    return PreparedKeyValue(
        bound["key"],
        bound["key_scale"],
        bound["value"],
        bound["multiplier"],
        bound["log_scale"],
        None if bound["is_causal"] else bound["value_mean"],
    )


def _linear(bound: dict[str, Any]) -> Projection:
    names = ("weight_qdata", "weight_scale", "bias", "group_size", "output_input_scale")
    return Projection(*(bound[name] for name in names))


def _empty(bound: dict[str, Any]) -> Tensor:
    """Check all operands and return an uninitialized result."""
    require_rows("query_chunk_rows", bound["query_chunk_rows"], _ROW_TILE)
    inputs, projection, _ = _queries(bound)
    batch, rows, _ = inputs.qdata.shape
    stored = (batch, projection.heads, padded_rows(rows), projection.head_dim)
    device = inputs.qdata.device
    lengths = (rows, bound["key_length"], bound["is_causal"])
    check_key_value_storage(stored, device, _key_value(bound), *lengths)
    _linear(bound).validate(projection.heads * projection.head_dim, device)
    outputs = bound["weight_qdata"].shape[0]
    return inputs.qdata.new_empty((batch, rows, outputs), dtype=bound["output_dtype"])


def _run(bound: dict[str, Any]) -> Tensor:
    output = _empty(bound)
    inputs, projection, transform = _queries(bound)
    rows, is_causal = inputs.qdata.shape[1], bound["is_causal"]
    key_value = _key_value(bound)
    # Backends are chosen by the device and the width of heads.
    backend = backend_for(key_value.key_codes, is_causal)
    packed = backend.pack(key_value)

    def attend(window: slice, out: Tensor, _gate: Tensor | None) -> None:
        query, scale, _ = project_query(
            inputs.window(slice(None), window),
            projection,
            transform.rows(window.start, window.stop),
            bound["softmax_scale"],
            None,
        )
        heads = out.transpose(1, 2)
        backend.attend_window(
            query, scale, packed, bound["key_length"], is_causal, window.start, heads
        )

    shape = (output.shape[0], rows, projection.heads, projection.head_dim)
    windows = _windows(shape, bound["query_chunk_rows"], output.device, is_causal)
    linear = Int8OutputLinear(_linear(bound))
    touched = [value for value in bound.values() if isinstance(value, Tensor)]
    return WindowedOutput(shape, output.dtype, windows, linear).run(attend, output, touched)


def _windows(
    shape: tuple[int, int, int, int], most: int, device: torch.device, is_causal: bool
) -> list[slice]:
    """Return the windows of the rows; on sm_120 whole waves of programs where they save one."""
    batch, rows, heads, _ = shape
    target = accelerator_target(device)
    if target is None or target.architecture != "sm_120" or is_causal:
        return balanced_windows(rows, most, _ROW_TILE)
    tiles = _PROGRAMS_PER_SM * sm_count(device) // (batch * heads)
    return wave_windows(rows, most, _ROW_TILE, tiles * _ROW_TILE)


projected_query_attention_output = define_operator(
    "convrot_int8_piper_projected_query_attention_output", _ARGUMENTS, _KEYWORDS, _empty, _run
)
