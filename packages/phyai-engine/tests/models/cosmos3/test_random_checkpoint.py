"""The tiny repository has the files, names and shapes of the published ones."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from phyai.models.cosmos3.random_checkpoint import (
    TINY_TRANSFORMER,
    main,
    transformer_shapes,
    write_random_checkpoint,
)
from phyai.models.cosmos3.random_parts import sound_shapes, vae_shapes

SIZES = {
    "nano": ("nano", 36, 4096, 12288, 32, 151936),
    "super": ("nano", 64, 5120, 25600, 64, 151936),
    "edge": ("edge", 28, 2048, 9216, 16, 131072),
}
# Tensors and parameters of the published transformers.
PUBLISHED = {
    "nano": (814, 15_173_669_120),
    "super": (1430, 64_019_736_832),
    "edge": (549, 3_369_657_024),
}


def full_size(name: str) -> dict:
    variant, layers, width, mlp, heads, vocabulary = SIZES[name]
    return {
        **TINY_TRANSFORMER[variant],
        "action_dim": 64,
        "head_dim": 128,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "patch_latent_dim": 192,
        "sound_dim": 64,
        "vocab_size": vocabulary,
    }


@pytest.mark.parametrize("name", SIZES)
def test_the_published_sizes_have_the_published_tensors(name):
    shapes = transformer_shapes(full_size(name))
    assert (len(shapes), sum(map(math.prod, shapes.values()))) == PUBLISHED[name]


def test_the_published_vae_has_the_published_tensors():
    shapes = vae_shapes(
        {
            "base_dim": 160,
            "decoder_base_dim": 256,
            "dim_mult": [1, 2, 4, 4],
            "in_channels": 12,
            "num_res_blocks": 2,
            "out_channels": 12,
            "temperal_downsample": [False, True, True],
            "z_dim": 48,
        }
    )
    assert (len(shapes), sum(map(math.prod, shapes.values()))) == (196, 704_688_668)
    assert shapes["decoder.up_blocks.0.upsampler.time_conv.weight"] == (2048, 1024, 3, 1, 1)


def test_the_sound_decoder_ends_in_its_channels():
    shapes = sound_shapes(
        {
            "dec_c_mults": [1, 2, 4, 8, 16],
            "dec_dim": 320,
            "dec_out_channels": 2,
            "dec_strides": [2, 4, 5, 6, 8],
            "vocoder_input_dim": 64,
        }
    )
    assert len(shapes) == 182
    assert shapes["decoder.block.0.conv_t1.weight_v"] == (5120, 2560, 16)
    assert shapes["decoder.conv2.weight_v"] == (2, 320, 7)


@pytest.mark.parametrize("variant", ["nano", "edge"])
def test_every_part_is_written(tmp_path: Path, variant):
    write_random_checkpoint(tmp_path, variant)
    folders = {"transformer", "vae", "scheduler", "text_tokenizer"}
    folders |= {"sound_tokenizer"} if variant == "nano" else set()
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == folders
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert folders <= set(index)
    config = json.loads((tmp_path / "transformer" / "config.json").read_text())
    with safe_open(tmp_path / "transformer" / "diffusion_pytorch_model.safetensors", "pt") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        assert file.get_tensor("proj_in.weight").dtype == torch.bfloat16
        for name in found:
            values = file.get_tensor(name).float()
            assert values.isfinite().all()
            assert values.unique().numel() > 1, f"{name} is constant and hides faults"
    assert found == transformer_shapes(config)
    policy = json.loads((tmp_path / "checkpoint.json").read_text())["policy"]
    assert policy["action_chunk_size"] == 32


def test_special_tokens_have_their_ids(tmp_path: Path):
    sizes = {}
    for variant in ("nano", "edge"):
        write_random_checkpoint(tmp_path / variant, variant, policy=None)
        tokenizer = Tokenizer.from_file(str(tmp_path / variant / "text_tokenizer/tokenizer.json"))
        sizes[variant] = tokenizer
        config = json.loads((tmp_path / variant / "transformer" / "config.json").read_text())
        assert tokenizer.get_vocab_size() <= config["vocab_size"]
        assert not (tmp_path / variant / "checkpoint.json").exists()
        text = "Put the cup, ünïcode 🤖 and\nlines."
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
        template = "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
        assert len(tokenizer.encode(template).ids) == 8
    edge = sizes["edge"]
    published = {"<s>": 1, "<|im_end|>": 11, "<|vision_start|>": 20, "<|vision_end|>": 21}
    assert {text: edge.token_to_id(text) for text in published} == published
    qwen = sizes["nano"]
    # The special tokens follow the vocabulary in the published order: 151643, 151644, 151645, ...
    offset = qwen.token_to_id("<|endoftext|>") - 151643
    assert qwen.token_to_id("<|im_end|>") - offset == 151645
    assert qwen.token_to_id("<|vision_start|>") - offset == 151652


def test_the_seed_decides_the_weights(tmp_path: Path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_random_checkpoint(tmp_path / name, seed=seed, num_hidden_layers=1)
    files = [
        (tmp_path / name / "vae" / "diffusion_pytorch_model.safetensors").read_bytes()
        for name in "abc"
    ]
    assert files[0] == files[1] != files[2]


def test_the_module_is_a_command(tmp_path: Path):
    main([str(tmp_path / "x"), "--variant", "edge"])
    assert (tmp_path / "x" / "model_index.json").is_file()
