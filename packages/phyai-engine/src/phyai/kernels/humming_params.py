"""Checks of what a policy passes to Humming: ``compute_config`` and ``tuning_config``."""

from collections.abc import Iterator, Mapping
from typing import Any

from phyai.kernels.humming_product import FLAGS, LOCKS

MOST_MULTIPROCESSORS = 192
"""Of any NVIDIA GPU: a policy is checked without knowing the GPU that will run it."""

_SIZES = ("num_ctas_per_sm", "multi_cast_size_a", "multi_cast_size_b")


def check_params(params: Mapping[str, Any]) -> None:
    """Checks the parameters of a Humming row.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a key or value is unknown, or a kernel needs more locks than a layer holds.
    """
    compute = params.get("compute_config", {})
    _check_compute(compute)
    for place, tuning in _tunings(params.get("tuning_config", {})):
        needed = 0 if compute.get("use_batch_invariant") else locks_needed(tuning, place)
        if needed > LOCKS:
            raise ValueError(
                f"{place} needs {needed} locks for its split along K on a GPU of "
                f"{MOST_MULTIPROCESSORS} multiprocessors, a layer holds {LOCKS}; lower "
                f"num_ctas_per_sm ({tuning.get('num_ctas_per_sm', 1)}), use fewer warps in a "
                "block, or set use_stream_k to false"
            )


def locks_needed(
    tuning: Mapping[str, Any],
    place: str = "tuning_config",
    multiprocessors: int = MOST_MULTIPROCESSORS,
) -> int:
    """Returns how many int32 locks Humming's launcher demands for a kernel.

    Blocks that share tiles along K, ``use_stream_k``, take a lock for each block of the grid, a
    tenth more in reserve, and one for each warp group that stores its own part of a WGMMA tile. A
    kernel without ``mma_type`` counts as WGMMA, which never counts too few.

    Args:
        tuning: a kernel's parameters.
        place: how messages call them.
        multiprocessors: of the GPU.

    Raises:
        TypeError: a parameter that the count depends on has the wrong type.
    """
    sizes = {name: _positive(tuning.get(name, 1), f"{place} {name}") for name in _SIZES}
    groups = _warp_groups(tuning, place)
    if not tuning.get("use_stream_k", True):
        return 0
    cluster = sizes["multi_cast_size_a"] * sizes["multi_cast_size_b"]
    clusters = multiprocessors * sizes["num_ctas_per_sm"] // cluster
    return (clusters + clusters // 10) * cluster * groups


def _warp_groups(tuning: Mapping[str, Any], place: str) -> int:
    block, warp = (_shape(tuning, name, place) for name in ("block_shape", "warp_shape"))
    is_wgmma = str(tuning.get("mma_type") or "wgmma").lower() == "wgmma"
    if block is None or warp is None or not is_wgmma or tuning.get("output_chunk_rows"):
        return 1
    return max(1, (block[0] // warp[0]) * (block[1] // warp[1]) // 4)


def _shape(tuning: Mapping[str, Any], name: str, place: str) -> list[int] | None:
    value = tuning.get(name)
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise TypeError(f"{place} {name} must be three sizes [M, N, K], got {value!r}")
    return [_positive(size, f"{place} {name}") for size in value]


def _positive(value: Any, place: str) -> int:
    if type(value) is not int or value < 1:
        raise TypeError(f"{place} must be a positive integer, got {value!r}")
    return value


def _check_compute(compute: Any) -> None:
    if not isinstance(compute, Mapping):
        raise TypeError(f"compute_config must be a mapping, got {compute!r}")
    for name, value in compute.items():
        if name == "gemm_type":
            if value != "dense":
                raise ValueError(f"gemm_type is {value!r}; allowed: dense")
        elif name not in FLAGS:
            allowed = ", ".join(("gemm_type", *FLAGS))
            raise ValueError(f"compute_config has unknown key {name!r}; allowed: {allowed}")
        elif not isinstance(value, bool):
            raise TypeError(f"compute_config {name} must be true or false, got {value!r}")


def _tunings(tuning: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields each kernel's parameters, with how messages call them."""
    if isinstance(tuning, Mapping):
        yield "tuning_config", tuning
        return
    entries = tuning if isinstance(tuning, list | tuple) else [tuning]
    for index, entry in enumerate(entries):
        is_range = isinstance(entry, list | tuple) and len(entry) == 3
        if not is_range or not isinstance(entry[2], Mapping):
            raise TypeError(
                f"tuning_config must be a mapping or a list of [low, high, mapping], got {entry!r}"
            )
        if not all(type(bound) is int and bound >= 0 for bound in entry[:2]):
            raise TypeError(f"tuning_config bounds must be non-negative integers, got {entry!r}")
        yield f"tuning_config[{index}]", entry[2]
