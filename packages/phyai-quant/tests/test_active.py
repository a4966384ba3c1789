import contextvars

import pytest

from phyai_quant import QuantPlan, get_active_plan, use_quant_plan


def test_plans_nest_and_none_switches_off():
    outer, inner = QuantPlan(source="outer"), QuantPlan(source="inner")
    assert get_active_plan() is None
    with use_quant_plan(outer) as active:
        assert active is outer
        with use_quant_plan(inner):
            assert get_active_plan() is inner
        with use_quant_plan(None):
            assert get_active_plan() is None
        assert get_active_plan() is outer
    assert get_active_plan() is None


def test_an_error_inside_restores_the_plan():
    with pytest.raises(RuntimeError), use_quant_plan(QuantPlan()):
        raise RuntimeError
    assert get_active_plan() is None


def test_other_contexts_do_not_see_the_plan():
    fresh = contextvars.Context()
    with use_quant_plan(QuantPlan()):
        assert fresh.run(get_active_plan) is None
