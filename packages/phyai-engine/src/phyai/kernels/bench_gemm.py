"""Inputs of measurements: matrix products with weights of every format.

A query states what a stored weight looks like, not the scheme that led to it. The schemes that
could are tried, and a random layer is loaded in the first format whose facts are the query's.
"""

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from phyai.dispatch.facts import Facts
from phyai.dispatch.types import QuantFacts
from phyai.kernels.bench import DTYPES, random_tensor
from phyai_quant import (
    Granularity,
    QDType,
    QuantConfigError,
    QuantScheme,
    TensorQuant,
    materialize,
)
from phyai_quant.specs.base import AllocationRequest, WeightSpec
from phyai_quant.specs.loading import load_state

_DENSE = ("bf16", "fp16")
_MICRO = {"nvfp4": 16, "mxfp4": 32}
_CODES = ("weight", "weight_packed")
_SCALE = 2.0**-7
_SMALLEST_SQUARE = 64


def gemm_inputs(facts: Facts, device: Any) -> tuple[Any, ...]:
    """Returns ``(layer, x, None)`` with a random layer of the query's format.

    Raises:
        NotImplementedError: if no weight format has the query's facts on this device.
    """
    m, n, k = (facts[f"shape.{name}"] for name in "MNK")
    x = random_tensor((m, k), facts["dtype.input"], device)
    if facts["quant.format"] in _DENSE:
        weight = facts.get("dtype.weight")
        stored = weight if isinstance(weight, str) else facts["dtype.input"]
        return SimpleNamespace(weight=random_tensor((n, k), stored, device)), x, None
    dtype = DTYPES.get(facts["dtype.output"])
    if dtype is None:
        raise NotImplementedError(f"no benchmark layer of dtype {facts['dtype.output']!r}")
    return random_layer(spec_of(facts, _sm(device)), (n, k), dtype, device), x, None


def _sm(device: Any) -> int | None:
    if torch.device(device).type != "cuda" or torch.version.cuda is None:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def spec_of(facts: Facts, sm: int | None) -> WeightSpec:
    """Returns the weight format whose signature has the ``quant.*`` facts of a query.

    Args:
        facts: facts of a query.
        sm: NVIDIA SM version of the device, such as 90; None without an NVIDIA GPU.

    Raises:
        NotImplementedError: if there is none.
    """
    wanted = _quant_facts(facts)
    for scheme in _schemes(wanted):
        try:
            spec = materialize(scheme, sm)
        except QuantConfigError:
            continue
        if QuantFacts.build(spec.physical_signature) == wanted:
            return spec
    raise NotImplementedError(
        f"no benchmark weights of format {wanted.format!r}, layout {wanted.layout!r}, "
        f"{dict(wanted.fields)}"
    )


def _quant_facts(facts: Facts) -> QuantFacts:
    prefix = "quant.fields."
    return QuantFacts(
        format=facts["quant.format"],
        layout=facts["quant.layout"],
        granularity=facts["quant.granularity"],
        block_k=facts["quant.block_k"],
        fields=tuple(
            (path.removeprefix(prefix), facts[path]) for path in facts if path.startswith(prefix)
        ),
    )


def _schemes(wanted: QuantFacts) -> Iterator[QuantScheme]:
    """Yields schemes that may be stored like this, those quantized at load first."""
    fields = dict(wanted.fields)
    weights = list(
        _tensor_quants(
            wanted.format,
            wanted.granularity,
            _blocks(wanted.block_k),
            rotation_group=fields.get("rotation_group"),
        )
    )
    inputs: list[TensorQuant | None] = [None]
    activation = fields.get("activation")
    if activation not in (None, "a16"):
        micro = _MICRO.get(str(activation))
        groups = ((1, micro),) if micro else ((1, 128), (1, 32), (1, 64))
        dynamic = fields.get("input_scale") != "static"
        inputs = list(
            _tensor_quants(activation, fields.get("input_granularity"), groups, dynamic=dynamic)
        )
    for online, weight, act in product((True, False), weights, inputs):
        yield QuantScheme(weight, act, online=online)


def _blocks(block_k: int | None) -> tuple[tuple[int, int], ...]:
    """Returns the likely block shapes; facts state the width of a block, not its height."""
    if block_k is None:
        return ()
    group, square = (1, block_k), (block_k, block_k)
    return (square, group) if block_k >= _SMALLEST_SQUARE else (group, square)


def _tensor_quants(
    dtype: Any,
    granularity: Any,
    blocks: tuple[tuple[int, int], ...],
    **options: Any,
) -> Iterator[TensorQuant]:
    shapes = blocks if granularity == Granularity.BLOCK else (None,)
    for shape, symmetric, micro in product(shapes, (True, False), (True, False)):
        if (dtype in _MICRO) and not micro:
            continue
        try:
            yield TensorQuant(
                QDType(dtype),
                Granularity(granularity),
                symmetric=symmetric,
                micro_scaled=micro,
                block_shape=shape,
                **options,
            )
        except ValueError:
            continue


def random_layer(
    spec: WeightSpec, shape: tuple[int, int], params_dtype: torch.dtype, device: Any
) -> nn.Module:
    """Returns a layer of one leg with a random weight of a format, ready to be multiplied.

    Formats that quantize while loading are given values; the others random codes and equal
    scales, whose size does not change how long a product takes.

    Args:
        spec: the format.
        shape: (N, K).
        params_dtype: dtype the layer computes in.
        device: where the layer lives.

    Raises:
        QuantConfigError: if the shape does not fit the format.
    """
    layer = nn.Module()
    # Rows may keep work buffers on a layer; copies of this one share them.
    vars(layer).update(prefix="benchmark", spec=spec, _humming_locks={})
    spec.allocate(layer, AllocationRequest(shape, params_dtype, device=device))
    if getattr(spec, "online", False) or spec.tensor_names() == ("weight",):
        spec.load_weight(layer, "weight", random_tensor(shape, "bf16", device))
    else:
        for part in load_state(layer).parts:
            allocated = cast("Tensor", getattr(layer, part, layer.weight))
            spec.load_weight(layer, part, _random_part(part, allocated))
    spec.process_after_loading(layer)
    return layer


def _random_part(part: str, like: Tensor) -> Tensor:
    """Returns a checkpoint tensor in the shape and dtype of what the layer allocated for it."""
    if part not in _CODES:
        value = _SCALE if like.is_floating_point() else 0
        return torch.full(like.shape, value, device=like.device).to(like.dtype)
    if like.is_floating_point():
        return random_tensor(tuple(like.shape), "fp32", like.device).to(like.dtype)
    limits = torch.iinfo(like.dtype)
    return torch.randint(
        limits.min, limits.max + 1, like.shape, dtype=like.dtype, device=like.device
    )
