"""The attention loops in plain Triton with the arguments of their launchers."""

from kernel_case import ALL, KernelCase

from piper_kernels._triton.targets import AcceleratorTarget
from piper_kernels.attention._mixed_sign import _launch
from piper_kernels.attention._mixed_sign.plan import fp8_plan, piper_plan, sparse_plan

_CODES = {"query_codes": "*i8", "key_codes": "*i8", "value_codes": "*i8", "out": "*bf16"}
_FLOATS = (
    *("query_scale", "key_scale", "value_multiplier", "value_mean", "value_scale", "coarse"),
)
_ROUTES = {"lengths": "*i32", "routes": "*u16", "table": "*i32", "gate": "*bf16"}
_TYPES = _CODES | _ROUTES | dict.fromkeys(_FLOATS, "*fp32")


def _by_plan(choose):
    """Yield every plan with the targets it is used on."""
    plans = {}
    for target in ALL:
        backend = "hip" if target.startswith("gfx") else "cuda"
        plan, _ = choose(AcceleratorTarget(backend, target))
        if plan is not None:
            plans.setdefault(plan, []).append(target)
    yield from ((plan, tuple(targets)) for plan, targets in plans.items())


def _case(kernel, variant, constants, plan, targets, **types):
    module = f"attention._mixed_sign_kernels.{kernel.removesuffix('_kernel')}"
    variant = f"{variant} {targets[0]}"
    options = {"num_warps": plan.num_warps, "num_stages": plan.num_stages}
    return KernelCase(module, kernel, variant, constants, _TYPES | types, options, targets)


def mixed_sign_cases():
    """Yield the loops for every target whose backend uses them."""
    for head_dim in (64, 128):
        for causal in (False, True):
            variant = f"D{head_dim} {'causal' if causal else 'full'}"
            for plan, targets in _by_plan(
                lambda target, d=head_dim, c=causal: piper_plan(target, d, c)
            ):
                constants = _launch.dense_constants(plan, head_dim, 1, causal)
                yield _case("dense_kernel", variant, constants, plan, targets)
            for plan, targets in _by_plan(lambda target, c=causal: fp8_plan(target, c)):
                constants = _launch.fp8_constants(plan, head_dim, causal)
                fp8 = {"value_codes": "*fp8e4nv"}
                yield _case("fp8_kernel", variant, constants, plan, targets, **fp8)
        for plan, targets in _by_plan(sparse_plan):
            constants = _launch.sparse_constants(plan, head_dim, 1)
            constants |= {"ROUTED": True, "HAS_LENGTHS": False, "HAS_COARSE": False}
            yield _case("sparse_kernel", f"D{head_dim}", constants, plan, targets)
