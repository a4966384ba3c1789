import math

from reach.sizes import count_parameters, reach_config, tensor_shapes
from reach.tokenizer import build_tokenizer

LIMIT_BYTES = 10_000_000
"""Largest bf16 file that the repository takes."""


def test_shipped_policy_stays_small():
    config = reach_config()
    unused_head = config.language.vocab * config.expert.width
    assert count_parameters(config) > 4_000_000
    assert 2 * (count_parameters(config) + unused_head) < LIMIT_BYTES


def test_widths_fit_quantization_groups():
    config = reach_config()
    for name, shape in tensor_shapes(config).items():
        if name.endswith("proj.weight") and "layers" in name:
            assert shape[1] % 128 == 0, name
            assert shape[0] % 64 == 0, name
    assert config.language.head_dim == config.expert.head_dim == 64
    assert config.vision.width // config.vision.heads == 64


def test_count_is_that_of_known_shapes():
    shapes = tensor_shapes(reach_config())
    language = "paligemma_with_expert.paligemma.model.language_model.layers.3"
    expert = "paligemma_with_expert.gemma_expert.model"
    assert shapes[f"{language}.self_attn.q_proj.weight"] == (512, 256)
    assert shapes[f"{language}.self_attn.k_proj.weight"] == (64, 256)
    assert shapes[f"{expert}.layers.0.mlp.down_proj.weight"] == (128, 256)
    assert shapes[f"{expert}.norm.dense.weight"] == (384, 128)
    assert shapes["action_in_proj.weight"] == (128, 32)
    assert count_parameters(reach_config()) == sum(math.prod(s) for s in shapes.values())


def test_vocabulary_is_the_tokenizers():
    assert reach_config().language.vocab == build_tokenizer().get_vocab_size()
