"""Layouts, key spellings and damaged files of checkpoints, on LeRobot's own tiny ones."""

import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from phyai.checkpoints import CheckpointError
from phyai.engine import Engine, EngineArgs
from phyai.engine_config import DeviceConfig, EngineConfig
from phyai.models.pi05.loading import load_pi05
from phyai.models.pi05.main_pi05 import PI05Args
from phyai.processing import Observation

FAMILIES = ("pi05", "pi0")
GROUP = "mixed_cameras"
TRUNK = "model.paligemma_with_expert."
HEAD = f"{TRUNK}paligemma.lm_head.weight"
EMBEDDING = f"{TRUNK}paligemma.model.language_model.embed_tokens.weight"
EXPERT_HEAD = f"{TRUNK}gemma_expert.lm_head.weight"
OPENPI_CONFIG = {
    "action_dim": 8,
    "action_horizon": 6,
    "paligemma_variant": "gemma_2b",
    "action_expert_variant": "gemma_300m",
    "precision": "float32",
}


def renamed(pattern, replacement):
    """Returns an edit that renames tensors, and fails if no name changes."""

    def edit(tensors):
        result = {re.sub(pattern, replacement, name): value for name, value in tensors.items()}
        assert result.keys() != tensors.keys()
        return result

    return edit


def tied(tensors):
    """The embedding under the output head's name only, as openpi's converter stores it."""
    rest = {name: value for name, value in tensors.items() if name != EMBEDDING}
    return rest | {HEAD: tensors[EMBEDDING]}


def without_model_prefix(tensors):
    return renamed(r"^model\.", "")(tensors)


def without(*names):
    return lambda tensors: {name: value for name, value in tensors.items() if name not in names}


def assert_gives_golden_actions(case, checkpoint):
    actions = load_pi05(checkpoint).sample_actions(case.inputs(GROUP), noise=case.noise(GROUP))
    assert_close(actions, case.actions(GROUP), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(without_model_prefix, id="no_model_prefix"),
        pytest.param(renamed(r"vision_tower\.vision_model\.", "vision_tower."), id="flat_vision"),
        pytest.param(
            renamed(r"paligemma\.model\.language_model\.", "paligemma.language_model.model."),
            id="language_model_first",
        ),
        pytest.param(
            renamed(r"paligemma\.model\.(vision_tower|multi_modal_projector)\.", r"paligemma.\1."),
            id="vision_beside_language",
        ),
        pytest.param(tied, id="tied_embedding"),
        pytest.param(without(HEAD), id="embedding_without_head"),
        pytest.param(without(EXPERT_HEAD), id="no_expert_head"),
    ],
)
def test_every_spelling_gives_the_same_actions(golden, write_variant, family, edit):
    assert_gives_golden_actions(golden(family), write_variant(family, edit))


def test_buffers_are_ignored(golden, write_variant):
    buffers = {
        f"{TRUNK}paligemma.model.language_model.rotary_emb.inv_freq": torch.ones(8),
        f"{TRUNK}paligemma.model.vision_tower.vision_model.embeddings.position_ids": torch.arange(
            4
        )[None],
    }
    checkpoint = write_variant("pi05", lambda tensors: tensors | buffers)
    assert_gives_golden_actions(golden("pi05"), checkpoint)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stale_output_head_is_not_used_as_embedding(golden, family):
    """LeRobot stores the head and the embedding apart, and trains only the embedding."""
    case = golden(family)
    stored = load_file(case.checkpoint / "model.safetensors")
    assert not torch.equal(stored[HEAD], stored[EMBEDDING])
    assert_gives_golden_actions(case, case.checkpoint)


@pytest.mark.parametrize("family", FAMILIES)
def test_openpi_layout(golden, write_variant, family):
    checkpoint = write_variant(
        family, lambda tensors: without_model_prefix(tied(tensors)), OPENPI_CONFIG
    )
    model = load_pi05(checkpoint)
    assert model.config.family == family
    assert model.config.layout == "openpi"
    assert model.config.chunk_size == 6
    assert_gives_golden_actions(golden(family), checkpoint)


def test_openpi_layout_with_its_statistics(golden, write_variant):
    """Actions of a robot preset are unnormalised by the quantiles under ``assets``."""
    case = golden("pi05")
    checkpoint = write_variant("pi05", tied, OPENPI_CONFIG)
    low, high = torch.linspace(-2, -1, 8), torch.linspace(1, 4, 8)
    stats = {"q01": low.tolist(), "q99": high.tolist(), "mean": [0.0] * 8, "std": [1.0] * 8}
    assets = checkpoint / "assets" / "physical-intelligence" / "libero"
    assets.mkdir(parents=True)
    (assets / "norm_stats.json").write_text(
        json.dumps({"norm_stats": {"state": stats, "actions": stats}})
    )
    args = PI05Args(
        checkpoint_dir=checkpoint,
        preset="openpi/pi05_libero",
        tokenizer_path=case.checkpoint / "tokenizer.model",
    )
    config = EngineConfig(device=DeviceConfig("cpu", torch.float32))
    engine = Engine(EngineArgs(plugin="pi05", plugin_args=args, config=config))
    image = case.cases["single.images"][0, 0].permute(1, 2, 0).numpy()
    observation = Observation(
        {"observation/image": image, "observation/wrist_image": image}, np.zeros(8), "reach"
    )
    chunk = engine.infer(observation, noise=case.noise("single"))
    normalized = torch.from_numpy(chunk.normalized)
    expected = (normalized + 1) / 2 * (high - low + 1e-6) + low
    assert_close(torch.from_numpy(chunk.actions), expected[:, :7], atol=1e-5, rtol=0)


def test_shards(golden, write_variant):
    checkpoint = write_variant("pi05")
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for index in range(2):
        shard = f"model-{index + 1:05d}-of-00002.safetensors"
        part = {name: tensors[name] for name in names[index::2]}
        save_file(part, checkpoint / shard)
        weight_map |= dict.fromkeys(part, shard)
    index_file = checkpoint / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert_gives_golden_actions(golden("pi05"), checkpoint)


@pytest.mark.parametrize(
    "name",
    [
        "action_in_proj.bias",
        "time_mlp_out.weight",
        "paligemma_with_expert.gemma_expert.model.layers.2.input_layernorm.dense.bias",
        "paligemma_with_expert.gemma_expert.model.layers.1.self_attn.v_proj.weight",
        "paligemma_with_expert.paligemma.model.language_model.layers.0.mlp.up_proj.weight",
        "paligemma_with_expert.paligemma.model.language_model.norm.weight",
        "paligemma_with_expert.paligemma.model.multi_modal_projector.linear.bias",
        "paligemma_with_expert.paligemma.model.vision_tower.vision_model.post_layernorm.bias",
        "paligemma_with_expert.paligemma.model.vision_tower.vision_model.encoder.layers.1."
        "self_attn.k_proj.bias",
    ],
)
def test_a_missing_tensor_is_named(write_variant, name):
    checkpoint = write_variant("pi05", without(f"model.{name}"))
    with pytest.raises(CheckpointError, match=re.escape(name)):
        load_pi05(checkpoint)


def test_a_missing_embedding_is_named(write_variant):
    checkpoint = write_variant("pi05", without(HEAD, EMBEDDING))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load_pi05(checkpoint)


@pytest.mark.parametrize(
    "name",
    [
        f"{TRUNK}gemma_expert.model.layers.0.input_layernorm.weight",
        f"{TRUNK}paligemma.model.language_model.layers.0.self_attn.q_proj.bias",
        "model.state_proj.weight",
        "model.adapter.lora_A.weight",
    ],
)
def test_an_unexpected_tensor_is_named(write_variant, name):
    checkpoint = write_variant("pi05", lambda tensors: tensors | {name: torch.zeros(3)})
    with pytest.raises(CheckpointError, match=re.escape(name.removeprefix("model."))):
        load_pi05(checkpoint)


def test_a_wrong_shape_is_named_with_both_shapes(write_variant):
    name = "model.action_out_proj.weight"
    checkpoint = write_variant("pi05", lambda tensors: tensors | {name: torch.zeros(7, 32)})
    with pytest.raises(CheckpointError, match=r"action_out_proj.*7, 32.*8, 32"):
        load_pi05(checkpoint)


@pytest.mark.parametrize("kept", [0, 7, 1000, -1])
def test_a_truncated_file_is_refused(write_variant, kept):
    checkpoint = write_variant("pi05")
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_pi05(checkpoint)


def test_pickled_weights_are_never_opened(write_variant):
    checkpoint = write_variant("pi05")
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*safetensors"):
        load_pi05(checkpoint)


def test_unknown_vision_heads_name_the_sidecar(write_variant):
    checkpoint = write_variant("pi05")
    (checkpoint / "phyai_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"vision_num_heads.*phyai_config\.json"):
        load_pi05(checkpoint)


@pytest.mark.parametrize("declared", ["pi0", "act"])
def test_a_type_that_the_tensors_contradict_is_refused(golden, write_variant, declared):
    config = json.loads((golden("pi05").checkpoint / "config.json").read_text())
    checkpoint = write_variant("pi05", config=config | {"type": declared})
    with pytest.raises(CheckpointError, match=declared):
        load_pi05(checkpoint)


def test_cut_config_is_refused(write_variant):
    checkpoint = write_variant("pi05")
    config = checkpoint / "config.json"
    config.write_text(config.read_text()[:100])
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_pi05(checkpoint)


def test_a_lora_checkpoint_is_refused(golden, write_variant):
    config = json.loads((golden("pi05").checkpoint / "config.json").read_text())
    adapter = {f"{TRUNK}gemma_expert.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2)}
    checkpoint = write_variant("pi05", lambda _: adapter, config | {"use_peft": True})
    with pytest.raises(CheckpointError):
        load_pi05(checkpoint)
