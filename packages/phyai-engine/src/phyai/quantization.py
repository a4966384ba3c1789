"""Which quantization plan a model is built under.

In this order: the ``quantization`` section of the kernel policy, the plan that is active around the
engine's constructor, the checkpoint's own config. The first that exists replaces the others, unless
merging is on: then its rules are tested before those of the checkpoint.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from phyai_quant import QuantPlan, get_active_plan, load_quant_plan, use_quant_plan

_MERGING: ContextVar[bool] = ContextVar("phyai_merge_checkpoint_quantization", default=False)


@contextmanager
def quant_sources(
    policy_plan: QuantPlan | None, *, merge_checkpoint: bool = False
) -> Iterator[None]:
    """Builds models inside the block under a policy's plan.

    Args:
        policy_plan: the policy's plan; None leaves the active one in force.
        merge_checkpoint: put the plan in force over the checkpoint's instead of in its place.
    """
    token = _MERGING.set(merge_checkpoint)
    try:
        with use_quant_plan(get_active_plan() if policy_plan is None else policy_plan):
            yield
    finally:
        _MERGING.reset(token)


def resolve_quant_plan(checkpoint_dir: str | Path) -> QuantPlan | None:
    """Returns the plan to load a checkpoint under; None is unquantized.

    Raises:
        QuantConfigError: the checkpoint's config cannot be honoured, or, when merging, both plans
            have a default and the two differ.
    """
    active = get_active_plan()
    if active is None:
        return load_quant_plan(checkpoint_dir)
    own = load_quant_plan(checkpoint_dir) if _MERGING.get() else None
    return active if own is None else active.merged_with(own)
