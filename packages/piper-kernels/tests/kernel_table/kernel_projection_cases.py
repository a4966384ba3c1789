"""The kernels that encode projected queries, keys and values with the arguments of launchers."""

from kernel_case import ALL, KernelCase

from piper_kernels.attention._preparation._launch import Values
from piper_kernels.fusions.projected_qk._launch import OPTIONS, SHARED_OPTIONS

_FLOATS = (
    *("source", "cos", "sin", "scales", "partials", "first_summary", "second_summary"),
    *("multiplier", "mean", "block_mean", "input_mean", "scale", "out"),
)
_TYPES = {
    **dict.fromkeys(_FLOATS, "*fp32"),
    **dict.fromkeys(("weight", "bias", "keys"), "*bf16"),
    **dict.fromkeys(("lengths", "words"), "*i32"),
    **dict.fromkeys(("codes", "qdata"), "*i8"),
    **dict.fromkeys(("eps", "factor"), "fp32"),
}
_SHARED = ("sm_90", "sm_100")
_KINDS = {"queries": "*i16", "keys": "*i8", "values": "*i8"}


def projection_cases():
    """Yield the kernels behind the products of projections."""
    for is_query in (True, False):
        name = "queries" if is_query else "keys"
        for head_dim, rotary, summary in ((128, 128, 1), (128, 96, 2), (64, 64, 0)):
            constants = {
                "D": head_dim,
                "ROTARY": rotary,
                "GROUPS": (32, 1, 1) if is_query else (1, 1, 1),
                "IS_QUERY": is_query,
                "SUMMARY": summary,
                "HAS_WEIGHT": True,
                "MASKED": summary == 2,
                "WIDE": False,
            }
            for targets, options in (
                (_SHARED, SHARED_OPTIONS),
                (tuple(target for target in ALL if target not in _SHARED), OPTIONS),
            ):
                kind = " two to a multiprocessor" if options is SHARED_OPTIONS else ""
                yield KernelCase(
                    "fusions.projected_qk._kernels",
                    "encode_heads_kernel",
                    f"{name} D{head_dim} R{rotary}{kind}",
                    constants,
                    _TYPES,
                    options,
                    targets,
                )
    module = "fusions.projected_value._kernels"
    for values in (Values.PER_TILE, Values.CENTERED, Values.PER_KEY):
        sparse = values is Values.PER_TILE
        constants = {"D": 128, "VALUES": int(values), "BLOCK_MEANS": sparse, "MASKED": sparse}
        variant = values.name.lower().replace("_", " ")
        yield KernelCase(
            module, "encode_projected_values_kernel", f"{variant} D128", constants, _TYPES
        )
    yield from _hopper()
    constants = {"HAS_BIAS": True, "ROWS": 8, "COLUMNS": 512}
    yield KernelCase(module, "project_mean_kernel", "", constants, _TYPES)


def _hopper():
    """Yield the product whose tiles leave encoded."""
    from triton.experimental.gluon import language as gl

    from piper_kernels.fusions.convrot_int8_sage_qk import _hopper as hopper

    plan = hopper.PAIR
    layout = gl.NVMMASharedLayout.get_default_for([plan.block_m, plan.block_k], gl.int8)
    descriptor = f"tensordesc<i8{[plan.block_m, plan.block_k]},{layout!r}>"
    angles = f"tensordesc<fp32{hopper.ANGLE_BLOCK},{hopper.angle_layout()!r}>"
    for kind, (name, codes) in enumerate(_KINDS.items()):
        no_angles = {"cos_desc": None, "sin_desc": None} if kind == hopper.VALUES else {}
        types = (
            _TYPES
            | dict.fromkeys(("cos_desc", "sin_desc"), angles)
            | {"codes": codes, "x_desc": descriptor, "w_desc": descriptor}
        )
        types |= dict.fromkeys(("x_scale", "w_scale"), "*fp32")
        for head_dim, rotary, summary in ((128, 128, 1), (64, 32, 0)):
            constants = {
                "KIND": kind,
                "D": head_dim,
                "ROTARY": rotary,
                "SUMMARY": summary,
                "STAGES": plan.stages,
                "GROUP_M": plan.group_m,
                "STORE": hopper.block_layout(kind, head_dim),
                "HAS_BIAS": True,
                "HAS_WEIGHT": True,
                "MASKED": bool(summary),
                "bias_stride": 1,
                "COPY_REGISTERS": hopper.COPY_REGISTERS,
            } | no_angles
            yield KernelCase(
                "fusions.convrot_int8_sage_qk._hopper_kernel",
                "hopper_encode_kernel",
                f"{name} D{head_dim} R{rotary}" if kind != hopper.VALUES else f"{name} D{head_dim}",
                constants,
                types,
                {"num_warps": plan.num_warps, "maxnreg": hopper.max_registers(plan)},
                ("sm_90",),
                gluon=True,
            )
