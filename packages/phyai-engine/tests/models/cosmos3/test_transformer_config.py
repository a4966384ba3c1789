import json

import pytest
import torch

from phyai.checkpoints import CheckpointError
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.model import Cosmos3Transformer
from phyai.models.cosmos3.state import Conditions

PUBLISHED = {
    "_class_name": "Cosmos3OmniTransformer",
    "_diffusers_version": "0.37.1",
    "action_dim": 64,
    "action_gen": True,
    "attention_bias": False,
    "base_fps": 24,
    "dtype": "bfloat16",
    "enable_fps_modulation": True,
    "freeze_und": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "joint_attn_implementation": "two_way",
    "latent_channel": 48,
    "latent_patch_size": 2,
    "max_position_embeddings": 262144,
    "model_type": "qwen3_vl_text",
    "num_attention_heads": 32,
    "num_embodiment_domains": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "patch_latent_dim": 192,
    "position_embedding_type": "unified_3d_mrope",
    "qk_norm": False,
    "qk_norm_for_diffusion": True,
    "qk_norm_for_text": True,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20]},
    "rope_theta": 5000000,
    "sound_dim": 64,
    "sound_gen": True,
    "sound_latent_fps": 25,
    "temporal_compression_factor_sound": 1,
    "timestep_scale": 0.001,
    "unified_3d_mrope_reset_spatial_ids": True,
    "unified_3d_mrope_temporal_modality_margin": 15000,
    "use_moe": True,
    "use_und_k_norm_for_gen": False,
    "video_temporal_causal": False,
    "vocab_size": 151936,
}
LARGE = {
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_attention_heads": 64,
    "num_hidden_layers": 64,
}
EDGE = {
    "backbone_type": "cosmos3_edge_nemotron_dense",
    "hidden_act": "relu2",
    "hidden_size": 2048,
    "intermediate_size": 9216,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "qk_norm_for_text": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100000000,
    "sound_dim": None,
    "sound_gen": False,
    "sound_latent_fps": None,
    "use_und_k_norm_for_gen": True,
    "vocab_size": 131072,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, Cosmos3Config.nano()), (LARGE, Cosmos3Config.super_()), (EDGE, Cosmos3Config.edge())],
    ids=["nano", "super", "edge"],
)
def test_published_configs(changes, expected, tmp_path):
    raw = {**PUBLISHED, **changes}
    assert Cosmos3Config.from_json(raw) == expected
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert Cosmos3Config.from_json(tmp_path) == expected
    assert Cosmos3Config.from_json(tmp_path / "config.json") == expected
    assert Cosmos3Config.from_json(expected.as_json()) == expected


def test_older_spellings_and_absent_heads():
    raw = {key: value for key, value in PUBLISHED.items() if key != "action_dim"}
    raw |= {"max_action_dim": 48, "rope_scaling": None, "rope_axes_dim": [22, 21, 21]}
    config = Cosmos3Config.from_json(raw)
    assert (config.action_dim, config.mrope_section) == (48, (22, 21, 21))
    bare = Cosmos3Config.from_json({"hidden_size": 128})
    assert (bare.action_gen, bare.action_dim, bare.sound_gen, bare.sound_dim) == (False, 0) * 2
    without = Cosmos3Config.from_json({**PUBLISHED, "sound_gen": False})
    assert without.sound_dim == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "4096"}, "hidden_size is '4096'; expected a positive int"),
        ({"hidden_size": 0}, "hidden_size is 0; allowed: 1 to"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"rope_theta": 0}, "rope_theta is 0; expected a positive number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"qk_norm_for_text": 1}, "qk_norm_for_text is 1; expected a bool"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; allowed: silu, relu2"),
        ({"num_key_value_heads": 5}, "32 query heads are not a multiple of 5 key heads"),
        ({"head_dim": 64}, r"mrope_section is \[24, 20, 20\]; it must add up to half"),
        ({"rope_axes_dim": [24, 40]}, r"rotary sections are \[24, 40\]; expected three counts"),
        ({"rope_scaling": "none"}, "rope_scaling is 'none'; expected an object"),
        ({"rope_scaling": {"mrope_interleaved": False}}, "mrope_interleaved is not true"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type is 'yarn'; only default and mrope"),
        ({"latent_channel": 16}, "patch_latent_dim is 192; 16 channels .* need 64"),
        ({"action_gen": True, "action_dim": None}, "action_gen is True but action_dim is 0"),
        ({"attention_bias": True}, "attention_bias is True; only False is computed here"),
        ({"video_temporal_causal": True}, "video_temporal_causal is True"),
        ({"temporal_compression_factor_sound": 2}, "only 1 is computed here"),
        ({"joint_attn_implementation": "three_way"}, "only 'two_way' is computed here"),
        ({"new_gate": 7}, "unknown key 'new_gate' with value 7"),
    ],
)
def test_what_cannot_be_computed_is_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        Cosmos3Config.from_json({**PUBLISHED, **changes})


def test_bad_files_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        Cosmos3Config.from_json(tmp_path)
    for text, message in (("{", "not valid JSON"), ("[]", "must hold an object, it holds a list")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            Cosmos3Config.from_json(tmp_path)


@pytest.mark.parametrize(
    ("config", "total", "generation", "embedding"),
    [
        (Cosmos3Config.nano(), 15_173_669_120, 6_946_071_552, 622_329_856),
        (Cosmos3Config.super_(), 64_019_736_832, 31_206_293_504, 777_912_320),
        (Cosmos3Config.edge(), 3_369_657_024, 1_409_408_000, 268_435_456),
    ],
    ids=["nano", "super", "edge"],
)
def test_parameters_are_those_of_diffusers(config, total, generation, embedding):
    """All but the output head, and of the last text layer all but what makes keys and values."""

    def count(module):
        return sum(parameter.numel() for parameter in module.parameters())

    model = Cosmos3Transformer(config, params_dtype=torch.bfloat16, device="meta")
    assert sum(count(layer) for layer in model.generation.layers) == generation
    assert model.embed_tokens.weight.numel() == embedding
    last = model.understanding.last
    unused = sum(rows * columns for rows, columns in (linear.shape for linear in last.unused))
    unused += 2 * config.hidden_size  # two norms over hidden vectors
    unused += config.head_dim * (config.qk_norm_for_text)  # one over query heads
    assert count(model) + unused + embedding == total


def test_products_and_cached_text_of_the_policy():
    """The published shapes: N and K of each product, and 147 kB of keys and values a token."""
    config = Cosmos3Config.nano()
    model = Cosmos3Transformer(config, params_dtype=torch.bfloat16, device="meta")
    layer = model.generation.layers[0]
    products = (layer.qkv_proj, layer.to_out, layer.mlp.up, layer.mlp.down_proj)
    assert [(one.out_features, one.in_features) for one in products] == [
        (6144, 4096),
        (4096, 4096),
        (24576, 4096),
        (4096, 12288),
    ]
    keys = torch.empty(36, 82, layer.qkv_proj.kv_heads, 128, dtype=torch.bfloat16, device="meta")
    assert Conditions(keys, keys).bytes == 82 * 147_456


def test_a_rank_has_its_part_of_the_parameters():
    from phyai.layers import TensorParallel
    from phyai.models.cosmos3.parallel import Parallel

    whole = Cosmos3Transformer(Cosmos3Config.nano(), device="meta")
    eighth = Cosmos3Transformer(
        Cosmos3Config.nano(), device="meta", parallel=Parallel(TensorParallel(7, 8))
    )
    for name, parameter in whole.named_parameters():
        ours = eighth.get_parameter(name)
        divided = parameter.ndim == 2 and not name.startswith(("time", "proj", "sound", "action"))
        assert ours.numel() == parameter.numel() // (8 if divided else 1), name
