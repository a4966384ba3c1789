"""Loading the VAE and the sound decoder from the folders of a checkpoint."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from phyai.checkpoints import CheckpointError
from phyai.models.cosmos3.sound import load_sound_decoder
from phyai.models.cosmos3.vae import TileConfig, load_vae

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(tiny_nano, tmp_path):
    shutil.copytree(tiny_nano / "vae", tmp_path / "vae")
    return tmp_path / "vae"


@pytest.fixture
def sound_folder(tiny_nano, tmp_path):
    shutil.copytree(tiny_nano / "sound_tokenizer", tmp_path / "sound")
    return tmp_path / "sound"


def rewrite(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def test_a_loaded_vae_computes(folder):
    vae = load_vae(folder, tiling=TileConfig(3, 2))
    clip = torch.rand(3, 5, 32, 48) * 2 - 1
    assert vae.decode(vae.encode(clip)).shape == clip.shape
    assert not vae.training


def test_the_encoder_is_loaded_alone(folder):
    whole = load_vae(folder)
    rewrite(folder, lambda tensors: [tensors.pop(n) for n in [*tensors] if n.startswith("dec")])
    encoder = load_vae(folder, parts=("encoder",), dtype=torch.float64)
    assert encoder.decoder is None
    frame = torch.rand(3, 16, 32) * 2 - 1
    torch.testing.assert_close(encoder.encode_frame(frame), whole.encode_frame(frame))
    with pytest.raises(CheckpointError, match="missing"):
        load_vae(folder)


def test_all_that_does_not_fit_is_named(folder):
    def change(tensors):
        del tensors["encoder.conv_in.bias"], tensors["post_quant_conv.weight"]
        tensors["decoder.extra"] = torch.zeros(1)
        tensors["lone"] = torch.zeros(1)
        tensors["decoder.conv_out.weight"] = torch.zeros(12, 7, 3, 3, 3)
        tensors["encoder.norm_out.gamma"] = torch.zeros(32)
        tensors["quant_conv.bias"] = torch.zeros(8, dtype=torch.int8)

    rewrite(folder, change)
    with pytest.raises(CheckpointError) as caught:
        load_vae(folder)
    text = str(caught.value)
    for part in (
        "2 missing",
        "encoder.conv_in.bias",
        "post_quant_conv.weight",
        "2 unexpected",
        "decoder.extra",
        "lone",
        "3 wrong",
        "decoder.conv_out.weight: the checkpoint has shape (12, 7, 3, 3, 3), the model needs (12, ",
        "encoder.norm_out.gamma",
        "quant_conv.bias: the checkpoint has torch.int8",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "config.json does not exist"),
        ("{", "config.json is not valid JSON"),
        ("[]", "must hold an object, it holds a list"),
        ('{"z_dim": 0}', "config.json: the VAE config has z_dim = 0"),
    ],
)
def test_a_broken_config_is_named(folder, text, message):
    path = folder / "config.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(CheckpointError, match=message):
        load_vae(folder)


@pytest.mark.parametrize("layout", ["volume", "stacked"])
def test_weights_are_kept_channels_last_without_copies(folder, layout):
    vae = load_vae(folder, layout=layout)
    for name, parameter in vae.named_parameters():
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        if parameter.ndim in formats:
            assert parameter.is_contiguous(memory_format=formats[parameter.ndim]), name
    folded = [name for name, _ in vae.named_parameters() if name.endswith("last_tap")]
    assert folded
    assert all(name.startswith("encoder.") for name in folded)


def test_the_shape_of_the_layout_does_not_matter(folder):
    one, other = (load_vae(folder, layout=layout) for layout in ("volume", "stacked"))
    clip = torch.rand(3, 9, 16, 16) * 2 - 1
    torch.testing.assert_close(one.encode(clip), other.encode(clip), atol=1e-5, rtol=1e-5)


def test_a_loaded_sound_decoder_computes(sound_folder):
    decoder = load_sound_decoder(sound_folder)
    latents = torch.randn(decoder.config.vocoder_input_dim, 3)
    expected = decoder.decode(latents)
    assert expected.shape == (2, 3 * 1920)
    # What the encoder of sounds stores is not read.
    rewrite(sound_folder, lambda tensors: tensors.update({"encoder.conv.bias": torch.zeros(3)}))
    assert torch.equal(load_sound_decoder(sound_folder).decode(latents), expected)


def test_what_a_sound_decoder_lacks_is_named(sound_folder):
    def change(tensors):
        del tensors["decoder.conv1.weight_g"]
        tensors["decoder.conv2.bias"] = torch.zeros(2)
        tensors["decoder.snake1.beta"] = torch.zeros(4)

    rewrite(sound_folder, change)
    with pytest.raises(CheckpointError) as caught:
        load_sound_decoder(sound_folder)
    for part in ("1 missing", "conv1.weight_g", "1 unexpected", "conv2.bias", "snake1.beta: the"):
        assert part in str(caught.value)


def test_a_broken_sound_config_is_named(sound_folder):
    path = sound_folder / "config.json"
    path.write_text(json.dumps({"dec_final_tanh": True}))
    with pytest.raises(CheckpointError, match=r"config\.json: .* dec_final_tanh = True"):
        load_sound_decoder(sound_folder)
