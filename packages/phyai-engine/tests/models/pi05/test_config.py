import json

import pytest

from phyai.checkpoints import CheckpointError, CheckpointReader
from phyai.models.pi05.config import PI05Config
from phyai.models.pi05.keys import canonical


@pytest.fixture
def read(golden, tmp_path):
    def run(family="pi05", sidecar=None, **changes):
        checkpoint = golden(family).checkpoint
        raw = json.loads((checkpoint / "config.json").read_text()) | changes
        (tmp_path / "config.json").write_text(json.dumps(raw))
        heads = (checkpoint / "phyai_config.json").read_text() if sidecar is None else sidecar
        (tmp_path / "phyai_config.json").write_text(heads)
        return PI05Config.read(tmp_path, CheckpointReader(checkpoint, canonical).shapes)

    return run


@pytest.mark.parametrize(("family", "extra"), [("pi05", 0), ("pi0", 1)])
def test_sizes_come_from_the_tensors(read, family, extra):
    config = read(family)
    assert config.family == family
    assert config.cameras == ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
    assert config.suffix_len == config.chunk_size + extra
    assert config.language.kv_heads == 1
    assert config.language.vocab > 0
    assert config.expert.vocab == 0
    assert config.vision.tokens * config.vision.patch**2 == 28 * 28


def test_always_absent_cameras_are_not_cameras(read):
    features = {
        "observation.images.front": {"type": "VISUAL", "shape": [3, 28, 28]},
        "observation.images.empty_camera_0": {"type": "VISUAL", "shape": [3, 28, 28]},
        "observation.state": {"type": "STATE", "shape": [5]},
    }
    config = read(input_features=features, empty_cameras=1)
    assert config.cameras == ("front",)
    assert config.state_dim == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "smolvla"}, "type is 'smolvla'; this loader reads pi05 and pi0"),
        ({"chunk_size": 0}, "chunk_size is 0; expected an int from 1"),
        ({"chunk_size": "50"}, "chunk_size is '50'"),
        ({"num_inference_steps": True}, "num_inference_steps is True"),
        ({"n_obs_steps": 2}, "n_obs_steps is 2; only 1 is known"),
        ({"input_features": {}}, "names no camera"),
        ({"input_features": []}, r"input_features is \[\]; expected an object"),
        ({"output_features": {"action": {"shape": []}}}, "output_features.action has no usable"),
        ({"image_resolution": [56, 56]}, "56x56 gives 16 patches, the position table has 4"),
        ({"image_resolution": [28]}, "image_resolution"),
        ({"image_resolution": "28"}, "image_resolution"),
        ({"sidecar": '{"vision_num_heads": 0}'}, "vision heads is 0"),
        ({"sidecar": '{"vision_num_heads": true}'}, "vision heads is True"),
        ({"sidecar": '{"vision_num_heads": 7}'}, "7 vision heads do not divide width 32"),
        ({"sidecar": "[]"}, "must hold an object, it holds a list"),
        ({"sidecar": "{"}, "not valid JSON"),
    ],
)
def test_a_bad_field_is_named(read, changes, message):
    with pytest.raises(CheckpointError, match=message):
        read(**changes)


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("model.action_in_proj.weight", "action_in_proj.weight"),
        ("model.time_mlp_in.bias", "time_mlp_in.bias"),
        ("model.state_proj.weight", "state_proj.weight"),
        (
            "paligemma_with_expert.paligemma.model.vision_tower.encoder.layers.3.mlp.fc1.weight",
            "paligemma_with_expert.paligemma.model.vision_tower.vision_model.encoder.layers.3.mlp.fc1.weight",
        ),
        (
            "paligemma_with_expert.paligemma.vision_tower.vision_model.post_layernorm.bias",
            "paligemma_with_expert.paligemma.model.vision_tower.vision_model.post_layernorm.bias",
        ),
        (
            "model.paligemma_with_expert.paligemma.language_model.model.norm.weight",
            "paligemma_with_expert.paligemma.model.language_model.norm.weight",
        ),
        (
            "paligemma_with_expert.paligemma.language_model.lm_head.weight",
            "paligemma_with_expert.paligemma.lm_head.weight",
        ),
        ("model.paligemma_with_expert.gemma_expert.lm_head.weight", None),
        ("paligemma_with_expert.gemma_expert.model.rotary_emb.inv_freq", None),
        ("something.else", "something.else"),
    ],
)
def test_spellings(stored, name):
    assert canonical(stored) == name
    assert name is None or canonical(name) == name
