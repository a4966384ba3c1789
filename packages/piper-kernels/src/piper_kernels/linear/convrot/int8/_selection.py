"""Which kernels a target executes ConvRot INT8 linear with. Needs neither Triton nor a device."""

from functools import cache
from types import ModuleType

from torch import Tensor

from piper_kernels._triton.targets import AcceleratorTarget
from piper_kernels.linear.convrot.int8._amd import plan as amd
from piper_kernels.linear.convrot.int8._nvidia import plan as nvidia
from piper_kernels.linear.convrot.int8._outputs import Projection
from piper_kernels.linear.convrot.int8._plan import MatmulPlan

# Neither Triton 3.6 nor 3.8 compiles an INT8 product for sm_75.
MIN_CAPABILITY = (8, 0)
_HOPPER = (9, 0)


def supports_matmul(target: AcceleratorTarget) -> tuple[bool, str]:
    """Return whether the INT8 matrix product has a schedule for a target, or why not."""
    if target.backend == "cuda":
        if target.capability >= MIN_CAPABILITY:
            return True, ""
        needed = "sm_80 or newer"
    else:
        if target.architecture in amd.ARCHITECTURES:
            return True, ""
        needed = f"one of {', '.join(amd.ARCHITECTURES)}"
    return False, (
        f"kernels of INT8 products need {needed}, got {target.architecture}; "
        "inputs are prepared with kernels there and multiplied with torch._int_mm"
    )


def select_matmul_plan(target: AcceleratorTarget | None, rows: int, columns: int) -> MatmulPlan:
    """Return the schedule of the generic kernel for ``[rows, K] @ [columns, K].T``."""
    if target is not None and target.backend == "hip":
        return amd.select_plan(rows, columns)
    return nvidia.select_plan(_HOPPER if target is None else target.capability, rows, columns)


def max_fused_width(target: AcceleratorTarget | None) -> int | None:
    """Return the features up to which a target prepares a row in registers; ``None``: all."""
    return amd.MAX_FUSED_WIDTH if target is not None and target.backend == "hip" else None


@cache
def hopper_launcher() -> ModuleType:
    """Return the module that launches the Hopper kernel; an import costs the host each time."""
    from piper_kernels.linear.convrot.int8._nvidia import hopper

    return hopper


@cache
def hopper_is_installed() -> bool:
    """Return whether Triton has the API that the Hopper kernel is written in."""
    try:
        hopper_launcher()
    except (ImportError, AttributeError):
        return False
    return True


@cache
def _is_hopper(target: AcceleratorTarget) -> bool:
    return target.backend == "cuda" and target.capability == _HOPPER


def uses_hopper(
    target: AcceleratorTarget | None,
    input_qdata: Tensor,
    first: Projection,
    second: Projection | None,
) -> bool:
    """Return whether the Gluon kernel multiplies these operands."""
    if target is None or not _is_hopper(target) or not hopper_is_installed():
        return False
    return hopper_launcher().is_usable(input_qdata, first, second)
