import pytest
import torch
from safetensors.torch import load_file, save_file

from phyai_quant import QuantConfigError
from phyai_quant.offline.checks import Severity, check_checkpoint
from phyai_quant.offline.quantize import RECORD_FILE, quantize_checkpoint

LAYER = "model.layers.0.q_proj"
INT8, FP8 = {"dtype": "int8"}, {"dtype": "fp8_e4m3"}


@pytest.fixture
def quantized(dense, tmp_path, make_policy):
    """Quantizes the dense checkpoint and hands its first shard to a function that damages it."""

    def make(weight, change, act=None):
        folder = tmp_path / "quantized"
        quantize_checkpoint(dense, folder, make_policy(weight, act))
        (folder / "model.safetensors.index.json").unlink()
        shard = folder / "model-1.safetensors"
        tensors = load_file(shard)
        change(tensors)
        save_file(tensors, shard)
        return check_checkpoint(folder)

    return make


def found(report, check: str, place: str, text: str) -> bool:
    return any(
        f.check == check and f.place == place and text in f.message and f.severity == "error"
        for f in report.findings
    )


def test_sound_checkpoints_have_no_findings(dense, quantized):
    seen: dict[str, int] = {}
    report = check_checkpoint(dense, on_progress=seen.__setitem__)
    assert (report.findings, report.quantized, report.layers) == ((), 0, 7)
    assert len(seen) == report.tensors
    for weight, act in [(FP8, None), ({"dtype": "mxfp4"}, None)]:
        report = quantized(weight, lambda _: None, act)
        assert (report.findings, report.failed, report.quantized) == ((), False, 6)
        import shutil

        shutil.rmtree(dense.parent / "quantized")


def set_(name, index, value):
    def change(tensors):
        tensor = tensors[f"{LAYER}.{name}"]
        view = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
        view.view(-1)[index] = value

    return change


@pytest.mark.parametrize(
    ("weight", "change", "place", "text"),
    [
        (FP8, set_("weight", 17, 0x7F), "weight", "1 of 17,152 values are NaN"),
        (FP8, set_("weight", 18, 0xFF), "weight", "1 of 17,152 values are NaN"),
        (FP8, set_("weight_scale", 3, torch.nan), "weight_scale", "every output of the rows"),
        (INT8, set_("weight_scale", 3, torch.inf), "weight_scale", "1 of 67 scales are infinite"),
        (
            {"dtype": "nvfp4"},
            set_("weight_global_scale", 0, torch.inf),
            "weight_global_scale",
            "calibration saw only zeros",
        ),
        (
            {"dtype": "nvfp4"},
            set_("weight_global_scale", 0, 0.0),
            "weight_global_scale",
            "1 of 1 scales are zero",
        ),
        ({"dtype": "mxfp4"}, set_("weight_scale", 9, 255), "weight_scale", "1 of 536 scales are"),
    ],
)
def test_values_that_make_no_sense(quantized, weight, change, place, text):
    report = quantized(weight, change)
    assert found(report, "values", f"{LAYER}.{place}", text), report.findings
    assert report.failed


def test_dense_values_are_read_as_well(quantized):
    def change(tensors):
        tensors["model.layers.0.norm.weight"][3] = torch.nan
        tensors["model.layers.0.norm.weight"][4] = -torch.inf

    report = quantized(INT8, change)
    name = "model.layers.0.norm.weight"
    assert found(report, "values", name, "1 of 256 values are NaN")
    assert found(report, "values", name, "1 of 256 values are infinite")


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "1 of 67 scales are zero"), (-1.0, "1 of 67 scales are negative")]
)
def test_odd_scales_are_warnings(quantized, value, text):
    report = quantized(FP8, set_("weight_scale", 2, value))
    (finding,) = report.findings
    assert (finding.severity, finding.message) == (Severity.WARNING, text)
    assert not report.failed


def drop(name):
    return lambda tensors: tensors.pop(f"{LAYER}.{name}")


def put(name, make):
    def change(tensors):
        tensors[f"{LAYER}.{name}"] = make(tensors[f"{LAYER}.weight"])

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (drop("weight_scale"), "never loaded"),
        (put("weight_scale", lambda w: torch.ones(66, 1)), "[66, 1]"),
        (put("weight", lambda w: w.float()), "(F32): not quantized, but"),
        (put("weight_scale_2", lambda w: torch.ones(1)), "weight_scale_2, which fp8_per_channel"),
    ],
)
def test_tensors_that_contradict_the_config(quantized, change, text):
    report = quantized(FP8, change)
    assert any(
        f.place == LAYER and f.check == "layer" and text in f.message for f in report.findings
    ), report.findings
    assert report.failed


def test_quantized_tensors_outside_the_config(quantized):
    def change(tensors):
        tensors["model.extra.weight"] = torch.ones(4, 4, dtype=torch.int8)
        tensors["model.lost.weight_scale"] = torch.ones(4)

    report = quantized(INT8, change)
    assert found(report, "layer", "model.extra", "would be loaded as unquantized")
    assert found(report, "layer", "model.lost.weight_scale", "belongs to no layer")


def test_files_and_configs(weights, write_checkpoint, dense):
    section = {"quant_method": "fp8", "ignored_layers": ["model.layers.9.q_proj"]}
    config = {"quantization_config": section}
    report = check_checkpoint(write_checkpoint(weights, "declared", config))
    assert any(
        "matches no layer: name 'model.layers.9.q_proj'" in f.message for f in report.findings
    )
    text = "weight (BF16): not quantized, but the default of"
    assert found(report, "layer", LAYER, text), report.findings
    assert found(report, "layer", LAYER, "quantization_config says weight fp8_e4m3")
    unknown = {"quantization_config": {"quant_method": "unknown"}}
    report = check_checkpoint(write_checkpoint(weights, "unknown", unknown))
    assert found(report, "config", "", "quant_method 'unknown' is unknown")
    (dense / "model-2.safetensors").unlink()
    (dense / RECORD_FILE).write_text("{}")
    report = check_checkpoint(dense)
    assert found(report, "files", "model-2.safetensors", "missing")
    assert found(report, "files", RECORD_FILE, "was interrupted")
    with pytest.raises(QuantConfigError, match="is no folder"):
        check_checkpoint(dense / "absent")


def test_layers_of_a_damaged_shard_are_not_called_unmatched(dense, tmp_path, make_policy):
    quantize_checkpoint(dense, tmp_path / "out", make_policy(INT8))
    shard = tmp_path / "out" / "model-1.safetensors"
    shard.write_bytes(shard.read_bytes()[:-9])
    (finding,) = check_checkpoint(tmp_path / "out").findings
    assert (finding.check, finding.place) == ("files", shard.name)


def test_convrot_markers_and_scales(dense, tmp_path, make_policy):
    folder = tmp_path / "rotated"
    quantize_checkpoint(dense, folder, make_policy({**INT8, "rotation_group": 64}, INT8))
    assert check_checkpoint(folder).findings == ()
    shard = folder / "model-1.safetensors"
    tensors = load_file(shard)
    tensors[f"{LAYER}.weight_scale"][4] = torch.nan
    save_file(tensors, shard)
    report = check_checkpoint(folder)
    assert any(LAYER in f.place and "nan" in f.message.lower() for f in report.findings)
    assert report.failed
