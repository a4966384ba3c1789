"""Linears of the humming-kernels package, called directly.

Humming compiles a kernel for every interval of M that it tunes for; a benchmark runs one M of a
layer, so that one kernel is compiled for each weight format and shape.
"""

import json
from bisect import bisect_left
from collections.abc import Callable
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from _linear_cases import LinearCase
from torch import Tensor

LOCKS = 4096
_GEMM = json.dumps({"gemm_type": "dense"})
_GROUP = 128


def refusal(case: LinearCase, device: torch.device) -> str:
    """Return why Humming cannot run a case, ``""`` when it can."""
    if find_spec("humming") is None:
        return "humming-kernels is not installed"
    if device.type != "cuda" or torch.version.cuda is None:
        return "Humming needs an NVIDIA GPU"
    if case.activation:
        return "not measured with an input activation"
    if case.n % 64 or case.k % 128:
        return f"Humming needs N in multiples of 64 and K of 128, got {case.n} and {case.k}"
    return ""


@cache
def _schemas(kind: str) -> tuple[Any, Any]:
    from humming.schema import HummingInputSchema, HummingWeightSchema

    plain: Any = HummingInputSchema()
    # Names of dtypes and modes become Humming's own objects when a schema is built.
    weights: dict[str, dict[str, Any]] = {
        "w4a16": {"b_dtype": "int4", "weight_scale_group_size": _GROUP},
        "int8": {"b_dtype": "int8", "weight_scale_type": "channel"},
        "nvfp4": {
            "b_dtype": "float4e2m1",
            "bs_dtype": "float8e4m3",
            "weight_scale_group_size": 16,
            "weight_scale_type": "group",
            "weight_scale_2_type": "tensor",
        },
    }
    if kind == "int8":
        options: dict[str, Any] = {"a_dtype": "int8", "input_quant_mode": "dynamic_token"}
        plain = HummingInputSchema(**options)
    return HummingWeightSchema(**weights[kind]), plain


@lru_cache(maxsize=64)
def _tuning(config: Any, index: int, rows: int) -> str:
    """Return the kernel parameters that Humming chooses for ``rows`` rows."""
    from humming.tune import get_heuristics_config

    intervals: list[Any] = list(get_heuristics_config(config, gemm_type="dense", device=index))
    highs = [high for _, high, _ in intervals]
    return json.dumps(intervals[min(bisect_left(highs, rows), len(highs) - 1)][2])


def build(kind: str, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Quantize and pack a weight and return its linear.

    Args:
        kind: ``"w4a16"`` (groups of 128), ``"int8"`` (rows, dynamic INT8 inputs) or
            ``"nvfp4"`` (weights only).
        weight: ``[N, K]`` in bf16 on a GPU.
        bias: ``[N]``, added in a kernel of its own, or ``None``.

    Returns:
        A function of contiguous bf16 ``[M, K]`` that returns ``[M, N]``.
    """
    from humming.forward import humming_forward
    from humming.schema import HummingWeightSchema
    from humming.transform import prepare_layer_config, transform_humming_tensors

    weight_schema, input_schema = _schemas(kind)
    rows, columns = weight.shape
    raw = HummingWeightSchema.quant_tensor(weight, weight_schema, weight.dtype)
    config = prepare_layer_config(
        shape_n=rows,
        shape_k=columns,
        weight_schema=weight_schema,
        input_schema=input_schema,
        torch_dtype=weight.dtype,
        device=weight.device,
    )
    packed: dict[str, Any] = dict(transform_humming_tensors(config, raw))
    locks = torch.zeros(LOCKS, dtype=torch.int32, device=weight.device)
    index = torch.cuda.current_device() if weight.device.index is None else weight.device.index

    def linear(x: Tensor) -> Tensor:
        output = humming_forward(
            config,
            inputs=x,
            weight=packed["weight"],
            weight_scale=packed.get("weight_scale"),
            weight_scale_2=packed.get("weight_scale_2"),
            zero_point=packed.get("zero_point"),
            locks=locks,
            compute_config=_GEMM,
            tuning_config=_tuning(config, index, x.shape[0]),
        )
        return output if bias is None else output + bias

    return linear
