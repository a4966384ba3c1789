"""``phyai inspect`` and ``phyai explain`` of Cosmos3, and the layers that its policies choose."""

import json
import re
from pathlib import Path

import pytest
import torch

from phyai.dispatch import load_policy
from phyai.layers import Linear
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.model import Cosmos3Transformer
from phyai.models.cosmos3.random_checkpoint import POLICY, write_random_checkpoint

POLICIES = sorted((Path(__file__).parents[4] / "examples/cosmos3/kernel_policies").glob("*.yaml"))
UNDERSTANDING = r"language_model\.layers\.\d+\.(self_attn\.(qkv_proj|to_out)|mlp\.\w+)"
GENERATION = r"gen_layers\.\d+\.(cross_attention\.(qkv_proj|to_out)|mlp\.\w+)"
SHORT = {**POLICY, "action_chunk_size": 4}


@pytest.fixture(scope="module")
def nano(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("nano"), policy=SHORT)


@pytest.fixture(scope="module")
def edge(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("edge"), "edge", policy=SHORT)


@pytest.fixture(scope="module", params=["qwen", "edge"])
def layers(request):
    config = Cosmos3Config.tiny(request.param)
    model = Cosmos3Transformer(config, device="meta")
    return [module for module in model.modules() if isinstance(module, Linear)]


@pytest.mark.parametrize("path", POLICIES, ids=[path.stem for path in POLICIES])
def test_a_policy_quantizes_projections_of_the_towers_alone(path, layers):
    plan = load_policy(path).quant_plan
    chosen = set()
    for layer in layers if plan is not None else ():
        legs = [leg.name for leg in layer.legs] if len(layer.legs) > 1 else None
        if plan.resolve(layer.prefix, type(layer), legs=legs) is not None:
            chosen.add(layer.prefix)
    towers = [UNDERSTANDING, GENERATION]
    every = {
        n for n in (layer.prefix for layer in layers) if any(re.fullmatch(t, n) for t in towers)
    }
    generation = {name for name in every if name.startswith("gen_layers.")}
    assert len(generation) == 3 * 4
    assert chosen <= every
    if path.stem.startswith("generation_"):
        assert chosen == generation
    elif path.stem.startswith("cosmos3_"):
        assert chosen <= generation
    else:
        assert chosen == every


def test_inspect_says_what_a_repository_holds(phyai, nano, edge):
    document = phyai("inspect", nano, "--json").json
    assert document["parts"]["vae"]["tensors"] == 196
    assert document["sizes"]["hidden_act"] == "silu"
    assert document["policy"]["actions"] == 4
    assert document["policy"]["sampling"]["steps"] == 4
    said = phyai("inspect", edge).out
    for part in ("cosmos3, nemotron", "relu2", "guidance 3 for timesteps of 960 to 1001", "id 8"):
        assert part in said
    assert re.search(r"sound +none", said)
    (nano / "checkpoint.json").rename(nano / "kept")
    try:
        assert "checkpoint.json does not declare" in phyai("inspect", nano).out
    finally:
        (nano / "kept").rename(nano / "checkpoint.json")


def policy_file(name):
    return next(path for path in POLICIES if path.stem == name)


def by_role(document, op="gemm"):
    found = {}
    for group in document["groups"]:
        if group["op"] == op:
            found.setdefault(group["role"], set()).add(group["selected"])
    return found


def test_explain_loads_and_answers_on_this_machine(phyai, nano, monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        policy = policy_file("generation_convrot_int8")
        command = ("explain", "--model", nano, "--policy", policy, "--device", "cpu", "--json")
        document = phyai(*command).json
    finally:
        torch.set_num_threads(threads)
    assert document["family"] == "cosmos3"
    assert document["problems"] == []
    rows = by_role(document)
    assert rows["generation"] == {"piper.gemm.convrot_int8"}
    assert rows["understanding"] == {"torch.gemm.bf16"}
    stored = {layer["name"]: layer["spec"] for layer in document["layers"]}
    assert stored["gen_layers.1.mlp.down_proj"].startswith("convrot_int8")
    assert stored["language_model.layers.0.mlp.down_proj"] == "bf16"


def test_explain_answers_for_a_gpu_that_is_not_here(phyai, edge):
    command = ("explain", "--checkpoint", edge, "--device", "nvidia:sm90", "--json")
    document = phyai(*command, "--policy", policy_file("convrot_int8")).json
    assert document["device"] == "sm90"
    rows = by_role(document)
    assert rows["generation"] == rows["understanding"] == {"piper.gemm.convrot_int8"}
    # 4 projections of each generation layer and the keys and values of the last text layer.
    quantized = [layer for layer in document["layers"] if layer["spec"].startswith("convrot")]
    assert len(quantized) == 2 * 4 + 4 + 1
    attention = by_role(document, "attention")
    assert set(attention) == {"understanding", "generation"}


def test_explain_names_the_part_that_is_missing(phyai, edge, tmp_path):
    (tmp_path / "transformer").mkdir()
    (tmp_path / "vae").mkdir()
    config = (edge / "transformer" / "config.json").read_text()
    (tmp_path / "transformer" / "config.json").write_text(config)
    found = phyai("explain", "--model", tmp_path, "--device", "nvidia:sm90")
    assert found.code == 1
    assert "the folder text_tokenizer is missing" in found.err
    assert json.loads(config)["hidden_act"] == "relu2"
