import sys
import types
from importlib.metadata import EntryPoint

import pytest

from phyai_quant import QuantConfigError, QuantPlan, load_quant_plan
from phyai_quant.importers import registry


def test_builtin_order():
    names = [importer.name for importer in registry.importers()]
    assert names[:4] == ["hf-fp8", "compressed-tensors", "modelopt", "comfy"]


@pytest.mark.parametrize(
    ("inline", "text"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq' is unknown"),
        ({"quant_library": "other"}, "quant_method 'other' is unknown"),
        ({"bits": 4}, "names no quant_method"),
        ({"quant_method": 8}, "quant_method: 8 is not allowed"),
    ],
)
def test_unknown_methods_name_method_and_file(checkpoint, inline, text):
    directory = checkpoint(inline)
    with pytest.raises(QuantConfigError) as error:
        load_quant_plan(directory)
    assert text in str(error.value)
    assert str(directory / "config.json") in str(error.value)


def test_a_standalone_file_without_quantization_is_refused(checkpoint):
    with pytest.raises(QuantConfigError, match=r"hf_quant_config\.json: names no quant_method"):
        load_quant_plan(checkpoint(standalone={"producer": {}}))


def test_a_standalone_file_without_quantization_is_refused_beside_a_config(checkpoint):
    with pytest.raises(
        QuantConfigError, match=r"hf_quant_config\.json: quantization: required key"
    ):
        load_quant_plan(checkpoint({"quant_method": "fp8"}, {"quantisation": {}}))
    assert load_quant_plan(checkpoint({"quant_method": "fp8"}, {})) is not None


def test_methods_are_matched_in_any_case(checkpoint):
    assert load_quant_plan(checkpoint({"quant_method": "FP8"})) is not None


class Mine:
    name = "mine"

    def detect(self, sources):
        return sources.method == "mine"

    def build_plan(self, sources):
        return QuantPlan(source="mine") if sources.inline.has("good") else "no plan"


@pytest.fixture
def add_plugin(monkeypatch):
    def add(value):
        def entry_points(group):
            assert group == "phyai_quant.importers"
            return [EntryPoint("mine", value, group)]

        monkeypatch.setattr(registry, "entry_points", entry_points)

    return add


def test_other_packages_add_importers(checkpoint, add_plugin, monkeypatch):
    module = types.ModuleType("package_with_importer")
    module.Mine = Mine
    monkeypatch.setitem(sys.modules, module.__name__, module)
    add_plugin("package_with_importer:Mine")
    assert registry.importers()[-1].name == "mine"
    assert load_quant_plan(checkpoint({"quant_method": "mine", "good": 1})).source == "mine"
    assert load_quant_plan(checkpoint({"quant_method": "fp8"})).source != "mine"
    with pytest.raises(QuantConfigError, match="'mine' returned str instead of a QuantPlan"):
        load_quant_plan(checkpoint({"quant_method": "mine"}))


@pytest.mark.parametrize("value", ["no_such_package:Mine", "json:no_such_class", "sys:maxsize"])
def test_a_broken_package_is_named(checkpoint, add_plugin, value):
    add_plugin(value)
    with pytest.raises(QuantConfigError) as error:
        load_quant_plan(checkpoint({"quant_method": "fp8"}))
    assert "importer 'mine' of entry-point group phyai_quant.importers" in str(error.value)
    assert repr(value) in str(error.value)
