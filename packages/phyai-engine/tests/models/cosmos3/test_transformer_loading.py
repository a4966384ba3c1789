"""Strict loading of the layout of diffusers, plain and quantized."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from phyai.checkpoints import CheckpointError, CheckpointReader
from phyai.layers import Linear, TensorParallel
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.loading import load_transformer
from phyai.models.cosmos3.parallel import Parallel
from phyai.models.cosmos3.random_weights import random_transformer
from phyai.models.cosmos3.state import ActionLayout, Layout, Modalities
from phyai.quantization import resolve_quant_plan
from phyai_quant import (
    Granularity,
    Matcher,
    QDType,
    QuantConfigError,
    QuantPlan,
    QuantScheme,
    Rule,
    TensorQuant,
    use_quant_plan,
)
from phyai_quant.offline.quantize import quantize_checkpoint

FIXTURES = Path(__file__).parent / "fixtures"
LAYOUT = Layout(3, 4, 6, (0,), 15.0, ActionLayout(5, 0, (0,), 6, 2))
CHANNEL = Granularity.PER_CHANNEL
TOKENS = TensorQuant(QDType.INT8, CHANNEL, dynamic=True)
SCHEMES = {
    "convrot_int8": QuantScheme(TensorQuant(QDType.INT8, CHANNEL, rotation_group=16), TOKENS),
    "fp8": QuantScheme(TensorQuant(QDType.FP8_E4M3, CHANNEL)),
}
# The layers that the shipped policies select.
SELECTED = re.compile(
    r"(language_model\.layers\.\d+\.self_attn\.(qkv_proj|to_out)"
    r"|gen_layers\.\d+\.cross_attention\.(qkv_proj|to_out)"
    r"|(language_model\.layers|gen_layers)\.\d+\.mlp\.(gate_up_proj|up_proj|down_proj))$"
)


def state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Modalities(
        torch.randn(4, 3, 4, 6, generator=generator), torch.randn(5, 8, generator=generator)
    )


def answer(model, timestep=833):
    (found,) = model.velocities(state(), timestep, [model.prefill(torch.arange(9))], LAYOUT)
    return torch.cat([found.video.flatten(), found.action.flatten()])


def load(folder, **options):
    return load_transformer(folder, params_dtype=torch.float32, **options)


@pytest.fixture(scope="module")
def golden():
    return answer(load(FIXTURES / "transformer_qwen"))


@pytest.fixture
def checkpoint(tmp_path):
    """One variant in a single file, whose tensors a test may change."""

    def write(variant="qwen", change=lambda tensors: None, config=None):
        source = FIXTURES / f"transformer_{variant}"
        tensors = {}
        for shard in sorted(source.glob("*.safetensors")):
            tensors |= load_file(shard)
        change(tensors)
        folder = tmp_path / "transformer"
        folder.mkdir(exist_ok=True)
        save_file(tensors, folder / "diffusion_pytorch_model.safetensors")
        raw = json.loads((source / "config.json").read_text()) | (config or {})
        (folder / "config.json").write_text(json.dumps(raw))
        return folder

    return write


def test_a_repository_its_folder_shards_and_one_file_are_the_same(checkpoint, golden):
    folder = checkpoint()
    for path in (folder, folder.parent):
        assert torch.equal(answer(load(path)), golden)


def test_the_reasoners_tensors_are_left_out(checkpoint, golden):
    def change(tensors):
        tensors["vision_encoder.blocks.0.attn.qkv.weight"] = torch.ones(2)
        tensors["visual.merger.mlp.0.bias"] = torch.ones(2)
        tensors["lm_head.weight"] = torch.ones(1)

    assert torch.equal(answer(load(checkpoint(change=change))), golden)
    without = checkpoint(change=lambda tensors: tensors.pop("lm_head.weight"))
    assert torch.equal(answer(load(without)), golden)


@pytest.mark.parametrize("variant", ["qwen", "edge"])
def test_every_tensor_is_accounted_for(checkpoint, variant):
    def change(tensors):
        for name in ("layers.1.self_attn.add_k_proj.weight", "layers.0.mlp.up_proj.weight"):
            del tensors[name]
        del tensors["layers.2.self_attn.to_q.weight"]  # of the last text layer: not needed
        tensors["proj_in.weight"] = torch.ones(64, 15)
        tensors["norm.weight"] = torch.ones(63)
        tensors["layers.0.self_attn.norm_added_q.weight"] = torch.ones(17)
        tensors["layers.1.self_attn.to_out.weight"] = torch.ones(64, 60)
        tensors["layers.3.self_attn.to_q.weight"] = torch.ones(1)
        tensors["action_proj_in.fc.weight"] = torch.ones(3, 512)

    with pytest.raises(CheckpointError) as caught:
        load(checkpoint(variant, change))
    message = str(caught.value)
    missing, unexpected, wrong = re.split(r"\n  \d+ (?:unexpected|wrong):", message)
    for name in ("1.self_attn.add_k_proj", "0.mlp.up_proj", "2.self_attn.to_q"):
        assert f"layers.{name}.weight" in missing
    assert "layers.3.self_attn.to_q.weight" in unexpected
    for text in (
        "proj_in: checkpoint tensor 'weight' has shape [64, 15]",
        "norm.weight: the checkpoint has shape (63,), the model has (64,)",
        "layers.0.self_attn.norm_added_q.weight: the checkpoint has shape (17,)",
        "layers.1.self_attn.to_out.weight: ",
        "action_proj_in.fc.weight: the checkpoint has shape (3, 512), the model needs (4, 512)",
    ):
        assert text in wrong


def test_a_config_of_another_model_is_noticed(checkpoint):
    with pytest.raises(CheckpointError, match=r"layers\.3\.input_layernorm\.weight"):
        load(checkpoint(config={"num_hidden_layers": 4}))
    with pytest.raises(CheckpointError, match=r"unexpected:\n    action_modality_embed"):
        load(checkpoint(config={"action_gen": False}))


def test_missing_files_are_named(tmp_path, checkpoint):
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        load(tmp_path)
    folder = checkpoint()
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no diffusion_pytorch_model\.safetensors and"):
        load(folder)


def test_rows_of_other_embodiments_and_unneeded_layers_are_never_read(monkeypatch, golden):
    whole, rows = [], []
    read, read_rows = CheckpointReader.get, CheckpointReader.get_rows

    def get(self, name, device="cpu"):
        whole.append(name)
        return read(self, name, device)

    def get_rows(self, name, chosen, device="cpu"):
        rows.append((name, tuple(chosen)))
        return read_rows(self, name, chosen, device)

    monkeypatch.setattr(CheckpointReader, "get", get)
    monkeypatch.setattr(CheckpointReader, "get_rows", get_rows)
    model = load(FIXTURES / "transformer_qwen", domains=(2, 0))
    tables = [
        f"action_proj_{end}.{part}.weight" for end in ("in", "out") for part in ("fc", "bias")
    ]
    assert sorted(rows) == sorted((name, (2, 0)) for name in tables)
    assert not set(tables) & set(whole)
    last = "layers.2.self_attn.to_q.weight", "layers.2.mlp.down_proj.weight", "lm_head.weight"
    assert not set(last) & set(whole)
    assert "layers.2.mlp_moe_gen.down_proj.weight" in whole
    assert model.action.proj_in.weight.shape == (2, 8, 64)
    assert torch.equal(answer(model), golden)


def test_what_is_not_served_is_refused():
    with pytest.raises(ValueError, match=r"domains has \[4\]; allowed: 0 to 3"):
        load(FIXTURES / "transformer_qwen", domains=(1, 4))
    model = load(FIXTURES / "transformer_qwen", domains=(1,))
    with pytest.raises(ValueError, match=r"domain_id is 2; this model was loaded for \[1\]"):
        answer(model)


@pytest.mark.parametrize("spelling", ["model", "checkpoint"])
@pytest.mark.parametrize("variant", ["qwen", "edge"])
def test_a_policy_selects_the_layers_of_both_towers(variant, spelling):
    pattern = SELECTED.pattern if spelling == "model" else r"layers\.\d+\.(self_attn|mlp).*"
    scheme = QuantScheme(SCHEMES["convrot_int8"].weight, TOKENS, online=True)
    plain = load(FIXTURES / f"transformer_{variant}")
    with use_quant_plan(QuantPlan((Rule(Matcher("regex", pattern), scheme),))):
        model = load(FIXTURES / f"transformer_{variant}")
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    chosen = {one.prefix for one in linears if one.spec.spec_id.startswith("convrot_int8")}
    assert chosen == {one.prefix for one in linears if SELECTED.match(one.prefix)}
    assert len(chosen) == 3 * 8 - 3
    close = torch.nn.functional.cosine_similarity(answer(model), answer(plain), dim=0)
    assert 0.99 < close < 1


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("variant", ["qwen", "edge"])
def test_a_quantized_checkpoint_computes_what_quantizing_at_load_does(variant, name, tmp_path):
    source = FIXTURES / f"transformer_{variant}"
    rule = Matcher("regex", r"layers\.\d+\.(self_attn|mlp|mlp_moe_gen)\..*")
    scheme = SCHEMES[name]
    quantize_checkpoint(source, tmp_path / "written", QuantPlan((Rule(rule, scheme),)))
    with use_quant_plan(resolve_quant_plan(tmp_path / "written")):
        stored = load(tmp_path / "written")
    online = QuantScheme(scheme.weight, scheme.input, online=True)
    with use_quant_plan(QuantPlan((Rule(Matcher("regex", SELECTED.pattern), online),))):
        quantized = load(source)
    formats = {one.spec.spec_id for one in stored.modules() if isinstance(one, Linear)}
    assert len(formats) == 2
    # The written scales are rounded to bf16.
    near = torch.nn.functional.cosine_similarity(answer(stored), answer(quantized), dim=0)
    far = torch.nn.functional.cosine_similarity(answer(stored), answer(load(source)), dim=0)
    assert 1 - near < 2e-4
    assert 1 - far > 5 * (1 - near)


@pytest.mark.parametrize("name", SCHEMES)
def test_ranks_hold_parts_of_a_quantized_checkpoint(name, tmp_path):
    rule = Rule(Matcher("regex", r"layers\.\d+\.(self_attn|mlp|mlp_moe_gen)\..*"), SCHEMES[name])
    quantize_checkpoint(FIXTURES / "transformer_qwen", tmp_path / "out", QuantPlan((rule,)))
    with use_quant_plan(resolve_quant_plan(tmp_path / "out")):
        whole = load(tmp_path / "out")
        ranks = [
            load(tmp_path / "out", parallel=Parallel(TensorParallel(rank, 2))) for rank in range(2)
        ]

    def dense(model, prefix):
        layer = next(
            one for one in model.modules() if isinstance(one, Linear) and one.prefix == prefix
        )
        return layer.spec.dequantize_weight(layer)

    for prefix, axis in (
        ("gen_layers.2.cross_attention.to_out", 1),
        ("language_model.layers.0.mlp.down_proj", 1),
        ("gen_layers.0.mlp.gate_up_proj", 0),
        ("language_model.layers.1.self_attn.qkv_proj", 0),
    ):
        parts = [dense(rank, prefix) for rank in ranks]
        if axis == 0:
            # Every leg is cut: put the halves of each behind one another.
            sizes = [32, 16, 16] if "qkv" in prefix else [48, 48]
            pairs = zip(*(part.split(sizes) for part in parts), strict=True)
            parts = [half for pair in pairs for half in pair]
        torch.testing.assert_close(torch.cat(parts, axis), dense(whole, prefix))


def test_a_quantized_checkpoint_needs_its_plan(tmp_path):
    rule = Rule(Matcher("regex", r".*mlp_moe_gen.*"), SCHEMES["fp8"])
    quantize_checkpoint(FIXTURES / "transformer_qwen", tmp_path / "out", QuantPlan((rule,)))
    with pytest.raises(QuantConfigError, match="quantization"):
        load(tmp_path / "out")


def test_a_rule_that_matches_nothing_is_told():
    rules = [Rule(Matcher("name", name), None, source=name) for name in ("lm_head", "blocks.0.fc")]
    with (
        use_quant_plan(QuantPlan(rules)),
        pytest.warns(UserWarning, match=r"blocks\.0\.fc") as told,
    ):
        load(FIXTURES / "transformer_qwen")
    assert len(told) == 1


def test_random_weights_are_the_same_in_every_format():
    config = Cosmos3Config.tiny("edge")
    plain = random_transformer(config, params_dtype=torch.float32, device="cpu", seed=3)
    scheme = QuantScheme(TensorQuant(QDType.INT8, CHANNEL), online=True)
    with use_quant_plan(QuantPlan((Rule(Matcher("regex", SELECTED.pattern), scheme),))):
        rounded = random_transformer(config, params_dtype=torch.float32, device="cpu", seed=3)
    same = torch.nn.functional.cosine_similarity(answer(plain), answer(rounded), dim=0)
    assert 0.999 < same < 1
    for name, parameter in plain.named_parameters():
        assert torch.isfinite(parameter).all(), name
        assert parameter.std() > 0, name
        assert torch.equal(parameter, parameter.bfloat16().float()), name
    other = random_transformer(config, params_dtype=torch.float32, device="cpu", seed=4)
    assert not torch.allclose(answer(other), answer(plain), atol=1e-2)


def test_a_stale_copy_of_the_fixture_would_be_noticed(tmp_path, golden):
    shutil.copytree(FIXTURES / "transformer_qwen", tmp_path / "t")
    first = sorted((tmp_path / "t").glob("*.safetensors"))[0]
    tensors = load_file(first)
    name = next(name for name in tensors if "add_q_proj" in name)
    tensors[name] = tensors[name].roll(1, 0)
    save_file(tensors, first)
    assert not torch.allclose(answer(load(tmp_path / "t")), golden, atol=1e-3)
