"""The sound decoder against diffusers' ``Cosmos3AVAEAudioTokenizer``, its sizes and errors."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from phyai.checkpoints.slots import collect_slots, stored_shapes
from phyai.models.cosmos3.hashed import hashed, hashed_weight
from phyai.models.cosmos3.sound import SoundConfig, SoundDecoder

GOLDEN = load_file(Path(__file__).parent / "fixtures" / "sound.safetensors")
SIZES = {
    "published_strides": {"dec_dim": 4},
    "odd_strides": {"dec_dim": 6, "dec_c_mults": [1, 2], "dec_strides": [3, 5]},
}


def build(sizes, **options):
    decoder = SoundDecoder.from_config({"vocoder_input_dim": 5, **sizes}, **options)
    slots = collect_slots(decoder)
    for name, shape in stored_shapes(decoder).items():
        slots[name].load(hashed_weight(name, shape))
    return decoder


@pytest.mark.parametrize("name", SIZES)
def test_sounds_are_decoded_as_diffusers_decodes_them(name):
    decoder, expected = build(SIZES[name]), GOLDEN[name]
    found = decoder.decode(hashed("sound", (5, 3)))
    assert found.shape == expected.shape == (2, 3 * decoder.config.hop)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_samples_are_clipped():
    decoder = build(SIZES["odd_strides"])
    decoder.conv_out.weight.data *= 1000
    assert decoder.decode(hashed("sound", (5, 3))).abs().max() == 1


def test_bf16_stays_close():
    expected = GOLDEN["published_strides"]
    found = build(SIZES["published_strides"], dtype=torch.bfloat16).decode(hashed("sound", (5, 3)))
    assert found.dtype == torch.float32
    assert (found - expected).norm() < 0.1 * expected.norm()


def test_the_published_decoder():
    config = SoundConfig()
    assert config.hop == 1920
    assert config.sampling_rate / config.hop == 25
    assert config.blocks == [
        (5120, 2560, 8), (2560, 1280, 6), (1280, 640, 5), (640, 320, 4), (320, 320, 2),
    ]  # fmt: skip
    shapes = stored_shapes(SoundDecoder(config, device="meta"))
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 473_097_282
    assert shapes["decoder.block.0.conv_t1.weight_v"] == (5120, 2560, 16)
    assert shapes["decoder.conv2.weight_v"] == (2, 320, 7)


# What diffusers' pipeline prepares: samples are cut to whole ones before frames are counted.
@pytest.mark.parametrize(
    ("frames", "fps", "expected"),
    [
        (33, 15, 55),
        (17, 15.0, 29),
        (189, 24, 197),
        (5, 10.0, 13),
        (1, 24, 2),
        (77, 10, 193),
        (25, 24.9999, 25),
        (25, 24.999, 26),
    ],
)
def test_latent_frames_cover_the_clip(frames, fps, expected):
    assert SoundConfig().frames(frames, fps) == expected
    assert build(SIZES["odd_strides"]).sound_frames(15, 48000) == 1


@pytest.mark.parametrize(("frames", "fps"), [(0, 24.0), (5, 0.0), (5, float("nan"))])
def test_a_clip_without_duration_has_no_sound(frames, fps):
    with pytest.raises(ValueError, match="has no sound"):
        SoundConfig().frames(frames, fps)


@pytest.mark.parametrize("shape", [(4, 3), (5, 0), (1, 5, 3)])
def test_latents_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"must be \[5, frames\]"):
        build(SIZES["odd_strides"]).decode(torch.zeros(shape))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dec_dim": 0}, "dec_dim = 0; it must be positive"),
        ({"dec_strides": [2, 4]}, "2 dec_strides and 5 dec_c_mults"),
        ({"dec_strides": []}, "dec_strides"),
        ({"snake_logscale": False}, "snake_logscale = False; it must be True"),
        ({"latent_mean": 0.5}, "latent_mean = 0.5; it must be None"),
        ({"hop_size": 960}, "hop_size = 960, but its dec_strides multiply to 1920"),
        ({"decoder": 1}, "unknown fields decoder; known are"),
    ],
)
def test_a_wrong_config_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        SoundConfig.from_dict(changes)


def test_fields_of_the_encoder_are_not_read():
    values = {
        "enc_type": "spec_convnext",
        "encoder_enabled": True,
        "stereo": True,
        "hop_size": None,
    }
    assert SoundConfig.from_dict(values) == SoundConfig()
