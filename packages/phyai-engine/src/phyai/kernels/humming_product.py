"""One product with packed Humming weights: kernel choice by M, warm-up, locks."""

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

LOCKS = 4096
"""int32 locks of a split along K; the launcher needs at most 290 for the shapes we know.

Policies that ask for more are refused, see `humming_params.locks_needed`."""

FLAGS = ("use_f16_accum", "use_batch_invariant", "use_m_major_input_scale")
"""Switches of a product in ``compute_config``."""

_compiled: set[tuple[str, str, str | None, int | None]] = set()


class Options:
    """How a product runs, serialized once.

    Humming looks kernels up by text, so mappings would be serialized at every call.

    Args:
        compute: Flags of the product: ``use_f16_accum``, ``use_batch_invariant``,
            ``use_m_major_input_scale``.
        tuning: A kernel's parameters, or ``[low, high, parameters]`` by M; None lets Humming
            choose by M.
    """

    __slots__ = ("compute", "flags", "tuning")

    def __init__(self, compute: Mapping[str, Any], tuning: Any = None) -> None:
        self.flags: tuple[bool, ...] = tuple(bool(compute.get(flag, False)) for flag in FLAGS)
        self.compute: str = json.dumps({"gemm_type": "dense", **compute})
        self.tuning: str | None = json.dumps(tuning) if tuning else None


class Buckets:
    """The kernels that Humming would choose, by M: one text per interval.

    Args:
        intervals: ``[exclusive low, inclusive high, parameters]`` in rising order.
    """

    __slots__ = ("highs", "texts")

    def __init__(self, intervals: Iterable[Any]) -> None:
        ordered = list(intervals)
        self.highs: list[Any] = [high for _, high, _ in ordered]
        self.texts: list[str] = [json.dumps(parameters) for _, _, parameters in ordered]

    def text(self, rows: int) -> str:
        """Returns the kernel parameters for ``rows`` rows; those of the last beyond it."""
        return self.texts[min(bisect_left(self.highs, rows), len(self.texts) - 1)]


@lru_cache(maxsize=512)
def buckets_of(config: Any, flags: tuple[bool, ...], device_index: int | None) -> Buckets:
    """Returns the kernels of a layer configuration, asked from Humming once per process."""
    from humming.tune import get_heuristics_config

    chosen = get_heuristics_config(
        config, gemm_type="dense", device=device_index, **dict(zip(FLAGS, flags, strict=True))
    )
    return Buckets(chosen)


def multiply(layer: Any, x: Tensor, options: Options) -> Tensor:
    """Multiplies ``x`` ``[M, K]``, contiguous, by a packed layer; activations are quantized inside.

    Raises:
        RuntimeError: The layer is not prepared for Humming; a CUDA graph is being captured and the
            kernel for this M was never run.
        ValueError: ``x`` is not on the layer's device, or of another dtype or K.
    """
    config = _config_of(layer)
    _check_input(layer, config, x)
    from humming.forward import humming_forward

    index = x.device.index
    tuning = options.tuning or buckets_of(config, options.flags, index).text(x.shape[0])
    key = (config.to_str(), options.compute, tuning, index)
    capturing = torch.cuda.is_current_stream_capturing()
    if capturing and key not in _compiled:
        raise RuntimeError(
            f"layer {_name_of(layer)!r} was never run with M = {x.shape[0]}: its Humming kernel "
            "must be compiled before a CUDA graph is captured; run this batch size once, or call "
            "warm_up"
        )
    out = humming_forward(
        config,
        inputs=x,
        weight=layer.weight,
        weight_scale=getattr(layer, "weight_scale", None),
        weight_scale_2=getattr(layer, "weight_scale_2", None),
        zero_point=getattr(layer, "zero_point", None),
        locks=_locks(layer, x.device, capturing=capturing),
        compute_config=options.compute,
        tuning_config=tuning,
    )
    _compiled.add(key)
    return out


def warm_up(layer: Any, batch_sizes: Iterable[int], options: Options | None = None) -> int:
    """Compiles and loads the kernels of a layer by running zeros; returns how many differ.

    Args:
        layer: A prepared layer.
        batch_sizes: Numbers of rows that will be used; one run per kernel.
        options: As the row that will run; default flags and Humming's choice when None.
    """
    options = options or Options({})
    config, device = _config_of(layer), layer.weight.device
    buckets = None if options.tuning else buckets_of(config, options.flags, device.index)
    by_kernel = {buckets.text(rows) if buckets else "": rows for rows in batch_sizes}
    for rows in by_kernel.values():
        zeros = torch.zeros(
            rows, config.shape_k - config.pad_shape_k, dtype=config.param_dtype, device=device
        )
        multiply(layer, zeros, options)
    return len(by_kernel)


def _name_of(layer: Any) -> str:
    return getattr(layer, "prefix", "") or type(layer).__name__


def _config_of(layer: Any) -> Any:
    config = getattr(layer, "humming_config", None)
    if config is None:
        raise RuntimeError(
            f"layer {_name_of(layer)!r} has no humming_config: its weights were not prepared for "
            "Humming; quantize it while loading, with the quantization section of a kernel policy"
        )
    return config


def _check_input(layer: Any, config: Any, x: Tensor) -> None:
    features = config.shape_k - config.pad_shape_k
    checks = (
        ("is on", x.device, layer.weight.device),
        ("is of", x.dtype, config.param_dtype),
        ("has K =", x.shape[-1], features),
    )
    for what, seen, wanted in checks:
        if seen != wanted:
            raise ValueError(
                f"layer {_name_of(layer)!r}: the input {what} {seen}, the packed weight needs "
                f"{wanted}; convert the input, or build the layer for it"
            )


def _locks(layer: Any, device: torch.device, *, capturing: bool) -> Tensor:
    """Returns zeroed locks: one buffer per layer, device and stream; a fresh one under capture.

    The zero fill of a fresh buffer is part of the graph, so graphs share none and every replay
    starts from zeros.
    """
    if capturing:
        return torch.zeros(LOCKS, dtype=torch.int32, device=device)
    buffers = layer.__dict__.setdefault("_humming_locks", {})
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    if key not in buffers:
        buffers[key] = torch.zeros(LOCKS, dtype=torch.int32, device=device)
    return buffers[key]
