"""The weight side of NVFP4 products and their schedules. Needs neither Triton nor a device."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from piper_kernels._triton.targets import accelerator_target, sm_count
from piper_kernels.linear.nvfp4._nvidia import hopper_plan
from piper_kernels.linear.nvfp4._nvidia.hopper_plan import HopperPlan
from piper_kernels.linear.nvfp4._plan import ProductPlan, plan_product
from piper_kernels.weights.nvfp4._layout import BLOCK_SIZE, SCALE_COLUMN_TILE, ceil_div

type Plan = ProductPlan | HopperPlan


@dataclass(frozen=True)
class Weight:
    """The weight side of a product.

    Attributes:
        qdata: uint8 ``[outputs, features / 2]``, contiguous.
        scale: float8_e4m3fn block scales, contiguous.
        level: FP32 scalar second level, or ``None``.
        bias: Floating ``[outputs]`` of any stride, or ``None``.
        swizzled: Layout of the block scales.
        high_first: Whether the even feature is the high nibble of a byte.
    """

    qdata: Tensor
    scale: Tensor
    level: Tensor | None
    bias: Tensor | None
    swizzled: bool
    high_first: bool

    @property
    def outputs(self) -> int:
        """Rows of the weight."""
        return self.qdata.shape[0]

    @property
    def features(self) -> int:
        """Columns of the weight."""
        return 2 * self.qdata.shape[1]

    @property
    def scale_columns(self) -> int:
        """What ``scale_offsets`` takes: tiles or blocks of a row."""
        return ceil_div(self.features, SCALE_COLUMN_TILE if self.swizzled else BLOCK_SIZE)

    def words(self) -> Tensor:
        """Return the codes as int16; storage that starts on an odd byte is copied."""
        aligned = self.qdata if self.qdata.data_ptr() % 2 == 0 else self.qdata.clone()
        return aligned.view(torch.int16)


def operand_dtype(logical_dtype: torch.dtype | None, device: torch.device) -> torch.dtype:
    """Return the dtype in which the matrix units of a device multiply.

    Args:
        logical_dtype: Dtype of an input that is multiplied as it is; ``None`` for the values of
            NVFP4 codes.
        device: Where the product runs. The interpreter multiplies in FP32.
    """
    if accelerator_target(device) is None:
        return torch.float32
    return torch.bfloat16 if logical_dtype is None else logical_dtype


def plan_of(weight: Weight, rows: int, dtype: torch.dtype) -> Plan:
    """Return the schedule of a product of ``rows`` input rows in a dtype."""
    device = weight.qdata.device
    target = accelerator_target(device)
    processors = 1
    if target is not None:
        processors = sm_count(device)
        if target.architecture == "sm_90" and dtype == torch.bfloat16 and _suits_hopper(weight):
            return hopper_plan.select_plan(rows, weight.outputs, weight.features, processors)
    return plan_product(target, processors, rows, weight.outputs, weight.features, dtype.itemsize)


@cache
def hopper_is_installed() -> bool:
    """Return whether Triton has the API that the Hopper kernels are written in."""
    try:
        from piper_kernels.linear.nvfp4._nvidia import hopper  # noqa: F401
    except (ImportError, AttributeError):
        return False
    return True


def _suits_hopper(weight: Weight) -> bool:
    """Return whether TMA can copy whole steps of a weight."""
    return (
        weight.swizzled
        and weight.features % hopper_plan.STEP == 0
        and weight.qdata.data_ptr() % 16 == 0
        and weight.scale.data_ptr() % 16 == 0
        and hopper_is_installed()
    )


def operand_width(features: int, plan: Plan) -> int:
    """Return the columns of an operand of ``features``."""
    return ceil_div(features, plan.arrangement) * plan.arrangement if plan.arrangement else features
