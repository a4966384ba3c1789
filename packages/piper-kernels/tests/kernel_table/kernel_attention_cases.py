"""The kernels of attention with the arguments of their launchers."""

from kernel_case import ALL, KernelCase, precision

from piper_kernels.attention._preparation._launch import Values
from piper_kernels.attention._preparation._statistics import Summary
from piper_kernels.attention._quantization import Granularity

E4M3_TARGETS = ("sm_89", "sm_90", "sm_100", "sm_120", "gfx1200", "gfx1201")
_OPERANDS = {"query": "*bf16", "key": "*bf16", "value": "*bf16", "lengths": "*i32"}
_CODES = {"query_codes": "*i8", "key_codes": "*i8", "value_words": "*i32", "value_sum": "*i32"}
_FLOATS = (
    *("query_scale", "query_summary", "key_scale", "key_summary", "key_aux", "rotated_mean"),
    *("value_multiplier", "value_logs", "value_numbers", "partials", "means", "rotated"),
)
_TYPES = _OPERANDS | _CODES | dict.fromkeys(_FLOATS, "*fp32") | {"query_factor": "fp32"}


def _groups(granularity):
    names = {"QUERY_GROUPS": granularity.query, "KEY_GROUPS": granularity.key}
    return {name: (g.repeats, g.groups, g.width) for name, g in names.items()}


def _quantize(variant, head_dim, values, sums=False, dtype="*bf16", **changes):
    constants = {
        "D": head_dim,
        "VALUES": int(values),
        "PERMUTED": True,
        "SUMS": sums,
        "MASKED": False,
        "WIDE": False,
        "HAS_QUERIES": True,
        "HAS_KEYS": True,
        "HAS_VALUES": True,
        "STAGES": 1,
    }
    constants |= _groups(changes.pop("granularity", Granularity.PER_WARP)) | changes
    types = _TYPES | dict.fromkeys(("query", "key", "value"), dtype)
    targets = E4M3_TARGETS if values is Values.E4M3 else ALL
    module = "attention._preparation._quantize_kernels"
    return KernelCase(module, "quantize_kernel", variant, constants, types, targets=targets)


def preparation_cases():
    """Yield the kernels that prepare operands and routes."""
    module = "attention._preparation._mean_kernels"
    for scales in (False, True):
        flags = {"D": 128, "MASKED": not scales, "VALUE_SCALES": scales}
        variant = "E4M3 scales" if scales else "means"
        yield KernelCase(module, "partial_kernel", variant, flags, _TYPES)
        yield KernelCase(module, "finish_kernel", variant, flags | {"CHUNKS": 16}, _TYPES)
    for head_dim in (64, 128):
        yield _quantize(f"dense D{head_dim}", head_dim, Values.CENTERED, sums=True)
        yield _quantize(f"sparse D{head_dim}", head_dim, Values.PER_TILE, MASKED=True)
    in_order = {"PERMUTED": False, "granularity": Granularity.PER_THREAD}
    yield _quantize("causal, keys in order, D128", 128, Values.PER_KEY, **in_order)
    yield _quantize("E4M3 D128", 128, Values.E4M3)
    yield _quantize("sparse, FP32, D128", 128, Values.PER_TILE, dtype="*fp32")
    yield from _summaries()
    types = {"codes": "*i16", "multiplier": "*fp32", "permuted": "*i16", "log_max": "*fp32"}
    module = "attention._preparation._repack_kernels"
    types |= {"value_sum": "*i32"}
    yield KernelCase(module, "repack_kernel", "D128", {"D": 128, "PER_TILE": False}, types)
    yield from _routes()


def _summaries():
    module = "attention._preparation._summary_kernels"
    types = {"source": "*bf16", "lengths": "*i32", "partials": "*fp32"}
    types |= {"first": "*fp32", "second": "*fp32"}
    for summary in Summary:
        for is_query in (False, True):
            constants = {"D": 128, "IS_QUERY": is_query, "SUMMARY": int(summary), "ROWS": 4}
            variant = f"{summary.name.lower()} of {'queries' if is_query else 'keys'}"
            flags = {"MASKED": summary is Summary.MEAN}
            options = {"num_warps": 1}
            yield KernelCase(module, "summary_kernel", variant, constants | flags, types, options)


def _routes():
    module = "attention._preparation._route_kernels"
    types = {"query": "*fp32", "key": "*fp32", "key_aux": "*fp32", "scores": "*fp32"}
    types |= {"table": "*i32", "routes": "*u16"}
    tile = {"D": 128, "ROWS": 64, "COLUMNS": 64, "DEPTH": 32, "PRECISION": precision}
    for minmax in (False, True):
        variant = "minmax" if minmax else "mean"
        yield KernelCase(module, "score_kernel", variant, tile | {"MINMAX": minmax}, types)
    for columns in (512, 16384):
        options = {"num_warps": columns // 512}
        yield KernelCase(
            module, "select_kernel", f"{columns}", {"COLUMNS": columns}, types, options
        )
    yield KernelCase(module, "table_kernel", "", {}, types)
