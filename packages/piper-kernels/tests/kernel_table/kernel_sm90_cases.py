"""The attention loops in Gluon and the coarse residual with the arguments of their launchers."""

from kernel_case import KernelCase, precision

_FLOATS = (
    *("q_scale", "k_scale", "v_log_max", "v_vector", "v_multiplier", "v_mean", "coarse"),
    *("query_summary", "key_summary", "key_aux", "value_mean"),
)
_INTEGERS = {"v_sum": "*i32", "lengths": "*i32", "routes": "*u16", "table": "*i32"}
_TYPES = _INTEGERS | dict.fromkeys(_FLOATS, "*fp32")
_TYPES |= dict.fromkeys(("query", "key", "value", "gate", "out"), "*bf16")
_HOPPER = ("sm_90",)


def sm90_cases():
    """Yield the loops for Hopper."""
    for head_dim in (64, 128):
        yield from _dense(head_dim)
        yield _routed(head_dim)
    module = "attention._sm90_kernels.sum_kernels"
    types = {"codes": "*i8", "sums": "*i32"}
    yield KernelCase(module, "tile_sum_kernel", "D128", {"D": 128}, types, targets=_HOPPER)


def _descriptor(element, block, layout=None):
    from triton.experimental.gluon import language as gl

    bits = gl.int8 if "8" in element else gl.int32
    layout = layout or gl.NVMMASharedLayout.get_default_for(block, bits)
    return f"tensordesc<{element}{block},{layout!r}>"


def _dense(head_dim):
    from piper_kernels.attention._sm90_kernels import launch

    for variant in ("full", "causal", "E4M3", "E4M3 causal"):
        fp8, causal = "E4M3" in variant, "causal" in variant
        plan = launch.choose_plan(head_dim, causal, fp8)
        constants = {
            "CAUSAL": causal,
            "FP8": fp8,
            "PER_KEY": causal and not fp8,
            "HAS_MEAN": not causal and not fp8,
            "GROUPS": plan.groups,
            "AHEAD": plan.ahead,
            "STAGES": plan.stages,
            "COPY_REGISTERS": launch.COPY_REGISTERS,
            "ATTEND_REGISTERS": plan.registers,
            "WINDOW": False,
        }
        types = _TYPES | {
            "q_desc": _descriptor("i8", [launch.TILE, head_dim]),
            "k_desc": _descriptor("i8", [launch.PAIR, head_dim]),
            "v_desc": _descriptor("fp8e4nv" if fp8 else "i8", [head_dim, launch.TILE]),
            "m_desc": _descriptor("fp32", [launch.PAIR]),
            "s_desc": _descriptor("i32", [head_dim]),
        }
        yield KernelCase(
            "attention._sm90_kernels.dense",
            "dense_attention_kernel",
            f"D{head_dim} {variant}",
            constants,
            types,
            {"num_warps": launch.WARPS},
            _HOPPER,
            gluon=True,
        )


def _routed(head_dim):
    from piper_kernels.attention._sm90_kernels import routed_launch as launch

    keys = launch.permuted_layout(head_dim)
    types = _TYPES | {
        "q_desc": _descriptor("i8", [launch.TILE, head_dim]),
        "k_desc": _descriptor("i8", [4, 2, 4, 2, head_dim], keys),
        "v_desc": _descriptor("i8", [head_dim, launch.TILE]),
    }
    constants = {
        "HAS_LENGTHS": False,
        "HAS_COARSE": False,
        "STAGES": launch.STAGES[head_dim],
        "STORE": launch.store_layout(head_dim),
        "COPY_REGISTERS": launch.COPY_REGISTERS,
    }
    return KernelCase(
        "attention._sm90_kernels.routed",
        "routed_attention_kernel",
        f"D{head_dim}",
        constants,
        types,
        {"num_warps": launch.WARPS, "maxnreg": launch.MAX_REGISTERS},
        _HOPPER,
        gluon=True,
    )


def coarse_cases():
    """Yield the kernels of the coarse residual."""
    module = "attention.coarse._kernels"
    for minmax in (False, True):
        constants = {"D": 128, "MINMAX": minmax, "HAS_LENGTHS": False}
        variant = "minmax" if minmax else "mean"
        yield KernelCase(module, "summarize_kernel", variant, constants, _TYPES)
    yield KernelCase(module, "gate_kernel", "", {"D": 128, "ROWS": 32}, _TYPES)
    types = dict.fromkeys(("query", "key", "key_aux", "value_mean", "out"), "*fp32")
    tile = {"D": 128, "ROWS": 16, "COLUMNS": 32, "DEPTH": 32, "PRECISION": precision}
    for minmax in (False, True):
        constants, variant = {"MINMAX": minmax, **tile}, "minmax" if minmax else "mean"
        yield KernelCase(module, "attend_kernel", variant, constants, types | {"scale": "fp32"})
