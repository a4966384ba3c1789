import sys
import types
from importlib.metadata import EntryPoint

import pytest

from phyai_quant import (
    Matcher,
    QuantConfigError,
    QuantPlan,
    QuantScheme,
    Rule,
    TensorQuant,
    materialize,
)
from phyai_quant.checkpoint import check_unquantized_dtypes
from phyai_quant.plan_io import plan_from_dict, plan_to_dict
from phyai_quant.specs import registry
from phyai_quant.specs.int8 import Int8Spec

INT8 = TensorQuant("int8", "per_channel")
MINE = QuantScheme(INT8, stored_by="mine")


@pytest.fixture
def install(monkeypatch):
    """Returns a function that installs formats: ``install(mine=build)``."""

    def add(*entries, **builders):
        module = types.ModuleType("format_under_test")
        vars(module).update(builders)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        group = registry.ENTRY_POINT_GROUP
        found = [EntryPoint(name, f"{module.__name__}:{name}", group) for name in builders]
        found += [EntryPoint(name, value, group) for name, value in entries]
        monkeypatch.setattr(registry, "entry_points", lambda *, group: tuple(found))

    return add


def test_only_the_named_format_is_asked(install):
    asked = []

    def mine(scheme, sm):
        asked.append((scheme, sm))
        return Int8Spec(scheme.weight)

    install(mine=mine, other=lambda scheme, sm: pytest.fail("not its scheme"))
    assert isinstance(materialize(MINE, 90), Int8Spec)
    assert asked == [(MINE, 90)]
    materialize(QuantScheme(INT8))
    materialize(None)
    assert len(asked) == 1


def test_a_format_may_store_what_no_policy_can_ask_for(install):
    odd = QuantScheme(TensorQuant("int8", "per_channel", symmetric=False), online=True)
    with pytest.raises(QuantConfigError, match="cannot quantize at load"):
        materialize(odd)
    install(mine=lambda scheme, sm: Int8Spec(scheme.weight))
    assert materialize(QuantScheme(odd.weight, online=True, stored_by="mine")) is not None


@pytest.mark.parametrize(
    ("entries", "builders", "message"),
    [
        ([], {}, r"'mine' is not installed; installed: fp8_rows\. .*phyai_quant\.specs"),
        ([], {"a": 1, "b": 2}, "'mine' is not installed; installed: a, b, fp8_rows"),
        ([("mine", "elsewhere:build")], {"mine": 1}, "installed more than once .*elsewhere:build"),
        ([("mine", "no_such_module:build")], {}, r"\(no_such_module:build\) cannot be imported"),
        ([], {"mine": lambda scheme, sm: None}, "does not store weight int8 per_channel.*on SM90"),
        ([], {"mine": lambda scheme, sm: object()}, "returned object, which lacks spec_id, "),
    ],
)
def test_unusable_formats_are_named(install, entries, builders, message):
    install(*entries, **builders)
    with pytest.raises(QuantConfigError, match=message):
        materialize(MINE, 90)


def test_a_refusal_of_the_format_passes(install):
    def mine(scheme, sm):
        raise QuantConfigError("mine needs SM100")

    install(mine=mine)
    with pytest.raises(QuantConfigError, match=r"^mine needs SM100$"):
        materialize(MINE, 90)


def test_the_name_is_part_of_the_scheme_and_of_plan_files():
    plan = QuantPlan((Rule(Matcher("name", "a"), MINE),), QuantScheme(INT8))
    assert QuantScheme(INT8) != MINE
    assert MINE.describe().endswith(", stored by mine")
    data = plan_to_dict(plan)
    assert data["rules"][0]["scheme"]["stored_by"] == "mine"
    assert "stored_by" not in data["default"]
    assert plan_from_dict(data) == plan
    data["rules"][0]["scheme"]["stored_by"] = 3
    with pytest.raises(QuantConfigError, match="stored_by"):
        plan_from_dict(data)


def test_tensors_of_a_foreign_format_need_a_layer_that_it_stores():
    tensors = {"a.weight": "I8", "a.SCB": "F32"}
    check_unquantized_dtypes(tensors, QuantPlan((Rule(Matcher("name", "a"), MINE),)))
    for plan in (None, QuantPlan((Rule(Matcher("name", "a"), QuantScheme(INT8)),))):
        with pytest.raises(QuantConfigError, match=r"a\.SCB \(F32\): no weight format here reads"):
            check_unquantized_dtypes(tensors, plan)
