"""Execution plans, chosen from the compiler target, the head width and the mask alone.

A plan never depends on a length, so that operators compile once for every sequence.
"""

from dataclasses import dataclass, replace
from enum import Enum

from piper_kernels._triton.targets import AcceleratorTarget
from piper_kernels.attention._quantization import Granularity

RDNA4 = ("gfx1200", "gfx1201")


class Product(Enum):
    """How unsigned probability codes are multiplied with signed value codes."""

    NVIDIA = "nvidia"
    AMD = "amd"
    AFFINE = "affine"


@dataclass(frozen=True)
class AttentionPlan:
    """How an attention loop is executed.

    Attributes:
        block_m: Queries of a program.
        grouped_qk: Whether 32 queries and 64 keys share a scale, instead of the rows of a thread.
        split_pv_head_dim: Whether the product with the values is made in two halves.
        derive_value_log_bound: Whether logarithms of value scales are bounded by bits.
        use_packed_probability_conversion: Whether codes are converted four at a time.
        num_warps: Warps of a program.
        num_stages: Stages of the software pipeline.
        product: How codes are multiplied.
    """

    block_m: int
    grouped_qk: bool
    split_pv_head_dim: bool = False
    derive_value_log_bound: bool = False
    use_packed_probability_conversion: bool = False
    num_warps: int = 4
    num_stages: int = 3
    product: Product = Product.NVIDIA

    @property
    def granularity(self) -> Granularity:
        """Which rows of queries and keys share a scale."""
        return Granularity.PER_WARP if self.grouped_qk else Granularity.PER_THREAD

    def with_granularity(self, granularity: Granularity) -> "AttentionPlan":
        """Return the plan for operands that were prepared with a granularity."""
        return replace(self, grouped_qk=granularity is Granularity.PER_WARP)


def piper_plan(
    target: AcceleratorTarget, head_dim: int, is_causal: bool
) -> tuple[AttentionPlan | None, str]:
    """Return the plan of dense Piper attention, or ``None`` and why there is none."""
    if target.backend == "hip":
        if target.architecture in RDNA4:
            return _rdna4_plan(), ""
        return None, f"mixed-sign products need gfx1200 or gfx1201, got {target.architecture}"
    major = target.capability[0]
    if major not in (8, 12):
        return None, f"mixed-sign products need sm_8x or sm_12x, got {target.architecture}"
    wide = head_dim == 128
    if target.capability == (12, 0):
        return _sm120_plan(wide, is_causal), ""
    narrow = is_causal or (major == 12 and wide)
    plan = AttentionPlan(
        block_m=64 if narrow else 128,
        grouped_qk=major == 12,
        split_pv_head_dim=wide and not narrow,
        use_packed_probability_conversion=True,
        num_warps=4 if narrow else 8,
    )
    if target.capability == (8, 9):
        plan = replace(plan, derive_value_log_bound=True)
    return plan, ""


def _sm120_plan(wide: bool, is_causal: bool) -> AttentionPlan:
    return AttentionPlan(
        block_m=64 if is_causal else 128,
        grouped_qk=True,
        split_pv_head_dim=wide,
        derive_value_log_bound=not is_causal,
        use_packed_probability_conversion=not (is_causal and wide),
        # Four warps would spill registers with 128 queries.
        num_warps=4 if is_causal else 8,
        num_stages=3 if is_causal else 2,
    )


def _rdna4_plan() -> AttentionPlan:
    return AttentionPlan(block_m=64, grouped_qk=True, num_stages=1, product=Product.AMD)


def sparse_plan(target: AcceleratorTarget) -> tuple[AttentionPlan | None, str]:
    """Return the plan of sparse Piper attention, or ``None`` and why there is none."""
    if target.backend == "cuda" and target.capability[0] in (8, 12):
        plan = AttentionPlan(64, True, use_packed_probability_conversion=True, num_stages=2)
        return plan, ""
    if target.architecture in RDNA4:
        return _rdna4_plan(), ""
    needs = "sm_8x, sm_12x, gfx1200 or gfx1201"
    return None, f"mixed-sign products need {needs}, got {target.architecture}"


def fp8_plan(target: AcceleratorTarget, is_causal: bool) -> tuple[AttentionPlan | None, str]:
    """Return the plan of SageAttention2++, or ``None`` and why there is none."""
    if target.backend != "cuda" or target.capability < (8, 9):
        return None, f"E4M3 matrix products need sm_89 or newer, got {target.architecture}"
    grouped = target.capability[0] == 12
    return AttentionPlan(64 if is_causal else 128, grouped, num_warps=4 if is_causal else 8), ""
