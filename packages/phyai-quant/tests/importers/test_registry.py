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


def test_other_packages_add_importers(checkpoint, monkeypatch):
    class Mine:
        name = "mine"

        def detect(self, sources):
            return sources.method == "mine"

        def build_plan(self, sources):
            return QuantPlan(source="mine")

    class EntryPoint:
        def load(self):
            return Mine

    def entry_points(group):
        assert group == "phyai_quant.importers"
        return [EntryPoint()]

    monkeypatch.setattr(registry, "entry_points", entry_points)
    assert load_quant_plan(checkpoint({"quant_method": "mine"})).source == "mine"
    assert load_quant_plan(checkpoint({"quant_method": "fp8"})).source != "mine"
