"""The plan in force while a model is built."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from phyai_quant.plan import QuantPlan

_ACTIVE: ContextVar[QuantPlan | None] = ContextVar("phyai_quant_active_plan", default=None)


@contextmanager
def use_quant_plan(plan: QuantPlan | None) -> Iterator[QuantPlan | None]:
    """Makes ``plan`` the active one inside the block; None switches quantization off there."""
    token = _ACTIVE.set(plan)
    try:
        yield plan
    finally:
        _ACTIVE.reset(token)


def get_active_plan() -> QuantPlan | None:
    """Returns the plan in force in this context, or None."""
    return _ACTIVE.get()
