import json
import shutil
from collections import namedtuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from phyai_quant import QuantConfigError, load_quant_plan
from phyai_quant.offline import quantize as module
from phyai_quant.offline.files import read_checkpoint
from phyai_quant.offline.layers import decide, find_layers
from phyai_quant.offline.quantize import RECORD_FILE, quantize_checkpoint
from phyai_quant.offline.spec_loading import dequantize_layer

INT8, FP8 = {"dtype": "int8"}, {"dtype": "fp8_e4m3"}
# weight, input, lowest SQNR in dB of rows drawn from a normal distribution
SCHEMES = {
    "fp8 channel": (FP8, FP8, 30),
    "fp8 tensor": ({**FP8, "granularity": "per_tensor"}, None, 30),
    "fp8 block": ({**FP8, "block_shape": [64, 128]}, FP8, 30),
    "int8 channel": (INT8, INT8, 40),
    "int8 channel a16": (INT8, None, 40),
    "int8 tensor": ({**INT8, "granularity": "per_tensor"}, INT8, 38),
    "int8 group a16": ({**INT8, "block_shape": [1, 64]}, None, 40),
    "int8 group": ({**INT8, "block_shape": [1, 128]}, INT8, 40),
    "int4 group": ({"dtype": "int4", "block_shape": [1, 32]}, None, 19),
    "int4 channel": ({"dtype": "int4"}, None, 15),
    "int4 a8": ({"dtype": "int4", "block_shape": [1, 128]}, INT8, 18),
    "nvfp4": ({"dtype": "nvfp4"}, None, 18),
    "mxfp4": ({"dtype": "mxfp4"}, None, 16),
    "convrot int8": ({**INT8, "rotation_group": 64}, INT8, 40),
    "convrot nvfp4": ({"dtype": "nvfp4", "rotation_group": 16}, None, 18),
}
SHARED_SCALES = ("fp8 tensor", "fp8 block", "int8 tensor")
LAYER = "model.layers.0.q_proj"


def read_weights(folder) -> dict[str, torch.Tensor]:
    plan = load_quant_plan(folder)
    layers = find_layers(read_checkpoint(folder).require_sound().tensors)
    return {layer.name: dequantize_layer(layer, decide(plan, layer).scheme) for layer in layers}


def tensors_of(folder) -> dict[str, torch.Tensor]:
    found = {}
    for shard in sorted(folder.glob("*.safetensors")):
        found |= load_file(shard)
    return found


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    def same(a: torch.Tensor, b: torch.Tensor) -> bool:
        bytes_a, bytes_b = (t.contiguous().flatten().view(torch.uint8) for t in (a, b))
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bytes_a, bytes_b)

    return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)


def sqnr(reference: torch.Tensor, seen: torch.Tensor) -> float:
    reference, seen = reference.double(), seen.double()
    return float(10 * torch.log10(reference.square().sum() / (reference - seen).square().sum()))


@pytest.mark.parametrize("name", SCHEMES)
def test_written_checkpoints_are_read_back(weights, write_checkpoint, tmp_path, make_policy, name):
    weight, act, floor = SCHEMES[name]
    for tensor in weights.values():  # rows that share a scale need one size
        if tensor.ndim == 2 and name in SHARED_SCALES:
            tensor[7] /= 1e4
    report = quantize_checkpoint(
        write_checkpoint(weights), tmp_path / "out", make_policy(weight, act)
    )
    read = read_weights(tmp_path / "out")
    assert len(report.work.layers) == 6
    assert report.work.kept == {"model.embed_tokens": "embedding"}
    for layer in report.work.schemes:
        original = weights[f"{layer}.weight"].float()
        ordinary = [row for row in range(len(original)) if row not in (5, 7)]
        assert sqnr(original[ordinary], read[layer][ordinary]) > floor
        assert read[layer].isfinite().all()
        assert read[layer][5].abs().max() == 0
    assert torch.equal(read["model.embed_tokens"], weights["model.embed_tokens.weight"].float())


def test_fp8_codes_and_scales_by_hand(weights, dense, tmp_path, make_policy):
    quantize_checkpoint(dense, tmp_path / "out", make_policy(FP8))
    stored = tensors_of(tmp_path / "out")
    codes, scale = stored[f"{LAYER}.weight"], stored[f"{LAYER}.weight_scale"]
    original = weights[f"{LAYER}.weight"].float()
    assert codes.dtype is torch.float8_e4m3fn
    assert scale.dtype is torch.bfloat16
    largest = original.abs().amax(1, keepdim=True)
    assert torch.equal(scale, (largest / 448).clamp_min(1e-30 / 448).bfloat16())
    steps = largest * 2.0**-4 + 1e-12  # half a step of the largest binade, and the bf16 scale
    assert ((codes.float() * scale.float() - original).abs() <= steps).all()


def test_int4_words_by_hand(weights, dense, tmp_path, make_policy):
    plan = make_policy({"dtype": "int4", "block_shape": [1, 64]})
    quantize_checkpoint(dense, tmp_path / "out", plan)
    stored = tensors_of(tmp_path / "out")
    words = stored[f"{LAYER}.weight_packed"].tolist()
    scale = stored[f"{LAYER}.weight_scale"].float()
    assert stored[f"{LAYER}.weight_shape"].tolist() == [67, 256]
    read = read_weights(tmp_path / "out")[LAYER]
    for row, column in [(0, 0), (3, 9), (66, 255), (7, 128)]:
        code = ((words[row][column // 8] >> (4 * (column % 8))) & 15) - 8
        assert read[row, column] == code * scale[row, column // 64]


@pytest.mark.parametrize("name", ["fp8 block", "int8 tensor", "nvfp4", "convrot nvfp4", "int4 a8"])
def test_pieces_do_not_change_the_result(dense, tmp_path, make_policy, monkeypatch, name):
    weight, act, _ = SCHEMES[name]
    quantize_checkpoint(dense, tmp_path / "whole", make_policy(weight, act))
    monkeypatch.setattr(module, "CHUNK_BYTES", 4 * 256 * 3)
    quantize_checkpoint(dense, tmp_path / "pieces", make_policy(weight, act))
    assert equal(tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "pieces"))


def test_everything_else_is_copied(weights, dense, tmp_path, make_policy):
    target = tmp_path / "out"
    report = quantize_checkpoint(dense, target, make_policy(INT8, INT8, "*.q_proj"))
    stored = tensors_of(target)
    for name, tensor in weights.items():
        if "q_proj" not in name:
            assert torch.equal(stored[name], tensor)
    assert {path.name for path in target.iterdir()} == {
        "config.json",
        "model-1.safetensors",
        "model-2.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    }
    config = json.loads((target / "config.json").read_text())
    assert config["model_type"] == "tiny"
    section = config["quantization_config"]
    assert section["format"] == "int-quantized"
    assert section["config_groups"]["group_0"]["targets"] == [
        "model.layers.0.q_proj",
        "model.layers.1.q_proj",
    ]
    assert "model.layers.1.down_proj" in section["ignore"]
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == stored.keys()
    sizes = sum(tensor.nbytes for tensor in stored.values())
    assert index["metadata"]["total_size"] == sizes == report.work.nbytes


def test_two_schemes_are_mixed_precision(dense, tmp_path):
    from phyai_quant.policy_section import parse_quantization_section

    plan = parse_quantization_section(
        {
            "rules": [
                {"match": {"name": "q_proj"}, "scheme": None},
                {"match": {"name": "o_proj"}, "weight": {"dtype": "nvfp4"}},
            ],
            "default": {"weight": {"dtype": "int4", "block_shape": [1, 128]}},
        }
    )
    quantize_checkpoint(dense, tmp_path / "out", plan)
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert section["format"] == "mixed-precision"
    formats = {group["format"] for group in section["config_groups"].values()}
    assert formats == {"nvfp4-pack-quantized", "pack-quantized"}
    read = load_quant_plan(tmp_path / "out")
    assert read.resolve("model.layers.1.o_proj").weight.dtype == "nvfp4"
    assert read.resolve("model.layers.1.q_proj") is None


class StopError(Exception):
    """Interrupts a run."""


def test_an_interrupted_run_continues(dense, tmp_path, make_policy):
    plan, target = make_policy(INT8, INT8), tmp_path / "out"
    quantize_checkpoint(dense, tmp_path / "whole", plan)

    def interrupt(name: str, _: int) -> None:
        if ".layers.1." in name:
            raise StopError

    with pytest.raises(StopError):
        quantize_checkpoint(dense, target, plan, on_progress=interrupt)
    assert (target / RECORD_FILE).exists()
    assert not (target / "config.json").exists()
    assert not (target / "model-2.safetensors").exists()
    first = (target / "model-1.safetensors").stat().st_mtime_ns

    with pytest.raises(QuantConfigError, match="another policy or another source"):
        quantize_checkpoint(dense, target, make_policy(FP8))

    seen: dict[str, int] = {}
    report = quantize_checkpoint(dense, target, plan, on_progress=seen.__setitem__)
    assert report.resumed == ("model-1.safetensors",)
    assert (target / "model-1.safetensors").stat().st_mtime_ns == first
    assert seen.keys() == read_checkpoint(dense).tensors.keys()
    assert equal(tensors_of(tmp_path / "whole"), tensors_of(target))
    assert not list(target.glob("*.partial"))
    assert not (target / RECORD_FILE).exists()


def test_a_finished_shard_of_another_size_is_written_again(dense, tmp_path, make_policy):
    plan, target = make_policy(INT8, INT8), tmp_path / "out"
    whole = quantize_checkpoint(dense, tmp_path / "whole", plan)
    target.mkdir()
    (target / "model-1.safetensors").write_bytes(b"cut")
    record = {"fingerprint": whole.work.fingerprint, "finished": {"model-1.safetensors": 77}}
    (target / RECORD_FILE).write_text(json.dumps(record))
    assert quantize_checkpoint(dense, target, plan).resumed == ()
    assert equal(tensors_of(tmp_path / "whole"), tensors_of(target))


def test_a_broken_record_is_named(dense, tmp_path, make_policy):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / RECORD_FILE).write_text("[1]")
    with pytest.raises(QuantConfigError, match="is no record of a run"):
        quantize_checkpoint(dense, tmp_path / "out", make_policy(INT8))


@pytest.mark.parametrize(
    ("weight", "act", "text"),
    [
        ({"dtype": "int4", "block_shape": [1, 256]}, None, "down_proj.*K = 384.*group of 256"),
        ({**INT8, "rotation_group": 256}, INT8, "K = 384 is not divisible by the rotation group"),
        ({"dtype": "fp8_e5m2"}, None, "no checkpoint layout holds fp8_e5m2.*writable: fp8_e4m3"),
        ({"dtype": "nvfp4"}, {"dtype": "nvfp4"}, "needs calibrated input scales"),
    ],
)
def test_schemes_that_do_not_fit_name_every_layer(dense, tmp_path, make_policy, weight, act, text):
    try:
        plan = make_policy(weight, act)
    except QuantConfigError:
        pytest.skip("the policy section does not take this input")
    with pytest.raises(QuantConfigError, match=f"(?s){text}") as error:
        quantize_checkpoint(dense, tmp_path / "out", plan)
    assert "model.layers.1." in str(error.value)
    assert not (tmp_path / "out").exists()


def test_rotated_and_plain_layers_do_not_mix(dense, tmp_path):
    from phyai_quant.policy_section import parse_quantization_section

    rules = [
        {"match": {"name": "q_proj"}, "weight": {**INT8, "rotation_group": 64}, "input": INT8},
        {"match": {"name": "o_proj"}, "weight": INT8, "input": INT8},
    ]
    with pytest.raises(QuantConfigError, match="in all rules or in none"):
        quantize_checkpoint(dense, tmp_path / "out", parse_quantization_section({"rules": rules}))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["fp8 tensor", "int8 channel", "convrot int8"])
def test_values_that_are_not_finite_are_refused(
    weights, write_checkpoint, tmp_path, make_policy, name, value
):
    weights[f"{LAYER}.weight"][66, 255] = value
    weight, act, _ = SCHEMES[name]
    with pytest.raises(QuantConfigError, match=rf"{LAYER}\.weight: rows 0 to 67 hold NaN or inf"):
        quantize_checkpoint(write_checkpoint(weights), tmp_path / "out", make_policy(weight, act))


def test_targets_and_sources_that_cannot_be(dense, tmp_path, make_policy, monkeypatch):
    plan = make_policy(INT8, INT8)
    full = tmp_path / "full"
    shutil.copytree(dense, full)
    with pytest.raises(QuantConfigError, match="holds no interrupted run"):
        quantize_checkpoint(dense, full, plan)
    for inside in (dense, dense / "out"):
        with pytest.raises(QuantConfigError, match="lies inside the source"):
            quantize_checkpoint(dense, inside, plan)
    with pytest.raises(QuantConfigError, match=r"quantizes no layer.*q_proj"):
        quantize_checkpoint(dense, tmp_path / "out", make_policy(INT8, INT8, "vision.*"))
    quantize_checkpoint(dense, tmp_path / "int8", plan)
    with pytest.raises(QuantConfigError, match="declares a quantization already"):
        quantize_checkpoint(tmp_path / "int8", tmp_path / "out", plan)
    usage = namedtuple("usage", "total used free")(10, 9, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(QuantConfigError, match="will be written but 1 are free"):
        quantize_checkpoint(dense, tmp_path / "out", plan)


def test_quantized_tensors_without_a_config_are_refused(tmp_path, make_policy):
    (tmp_path / "dense").mkdir()
    save_file({"a.weight": torch.ones(4, 4, dtype=torch.int8)}, tmp_path / "dense/x.safetensors")
    with pytest.raises(QuantConfigError, match=r"a\.weight .*declares no quantization"):
        quantize_checkpoint(tmp_path / "dense", tmp_path / "out", make_policy(INT8))


def test_rules_that_match_nothing_are_reported(dense, tmp_path):
    from phyai_quant.policy_section import parse_quantization_section

    rules = [
        {"match": {"name": "k_proj"}, "scheme": None},
        {"match": {"glob": "*"}, "weight": INT8, "input": INT8},
    ]
    report = quantize_checkpoint(
        dense, tmp_path / "out", parse_quantization_section({"rules": rules})
    )
    assert [rule.matcher.pattern for rule in report.work.unmatched] == ["k_proj"]


def test_statistics_beside_a_single_file_are_copied(weights, tmp_path, make_policy):
    source = tmp_path / "source"
    source.mkdir()
    save_file(weights, source / "model.safetensors")
    for name in ("preprocessor", "postprocessor"):
        save_file({"action.mean": torch.ones(7)}, source / f"{name}.safetensors")
    save_file({"old.weight": torch.ones(7, 7)}, source / "old.safetensors")
    report = quantize_checkpoint(source, tmp_path / "out", make_policy(INT8, INT8))
    assert report.shards == ("model.safetensors",)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
        "preprocessor.safetensors",
        "postprocessor.safetensors",
    }
