"""The VAE against diffusers' ``AutoencoderKLWan`` on the same weights and inputs.

``scripts/build_cosmos3_vae_fixtures.py`` wrote the outputs; weights and inputs follow from names.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from phyai.models.cosmos3.hashed import hashed
from phyai.models.cosmos3.vae import TileConfig, WanVAE
from phyai.models.cosmos3.vae.random_weights import fill, tiny_config

BOUND = 1e-5
GOLDEN = load_file(Path(__file__).parent / "fixtures" / "vae.safetensors")
LAYOUTS = ("volume", "stacked")


@pytest.fixture(scope="module", params=LAYOUTS)
def vae(request):
    return fill(WanVAE(tiny_config(), layout=request.param))


@pytest.fixture(scope="module")
def clip():
    return hashed("clip", (3, 13, 32, 48))


def error(found, expected):
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max())


def statistics(vae):
    config = vae.config
    return (
        torch.tensor(values).view(-1, 1, 1, 1)
        for values in (config.latents_mean, config.latents_std)
    )


def test_a_clip_is_encoded_as_diffusers_encodes_it(vae, clip):
    mean, std = statistics(vae)
    latents = vae.encode(clip)
    assert latents.dtype == torch.float32
    assert error(latents * std + mean, GOLDEN["encoded"]) < BOUND


@pytest.mark.parametrize("frames", [1, 5, 9])
def test_the_latents_of_a_prefix_are_the_prefix_of_the_latents(vae, clip, frames):
    count = 1 + (frames - 1) // 4
    whole, prefix = vae.encode(clip), vae.encode(clip[:, :frames])
    assert error(prefix, whole[:, :count]) < BOUND
    part = vae.encode(clip, frames=count)
    assert torch.equal(part[:, :count], prefix)
    assert part.shape == whole.shape
    assert not part[:, count:].any()


def test_frames_that_are_not_encoded_are_not_read(vae, clip):
    unread = clip.clone()
    unread[:, 5:] = torch.nan
    assert vae.encode(unread, frames=2).isfinite().all()
    assert vae.encode(unread)[:, 2:].isnan().any()


def test_one_frame_is_encoded_by_the_last_taps_alone(vae, clip):
    mean, std = statistics(vae)
    found = vae.encode_frame(clip[:, 0])
    assert error(found * std[:, 0] + mean[:, 0], GOLDEN["encoded"][:, 0]) < BOUND


@pytest.mark.parametrize(
    ("golden", "name", "shape"),
    [("decoded", "latents", (6, 4, 2, 3)), ("decoded_wide", "wide", (6, 2, 1, 5))],
)
def test_latents_are_decoded_as_diffusers_decodes_them(vae, golden, name, shape):
    expected = GOLDEN[golden]
    assert (expected.abs() < 1).float().mean() > 0.5  # most pixels are not clipped
    assert error(vae.decode(2 * hashed(name, shape)), expected) < BOUND


def test_groups_of_a_stream_are_the_frames_of_the_clip(vae):
    latents = 2 * hashed("latents", (6, 4, 2, 3))
    groups = list(vae.decode_stream(latents))
    assert [group.shape[1] for group in groups] == [1, 4, 4, 4]
    assert torch.equal(torch.cat(groups, dim=1), vae.decode(latents))


def test_later_latents_do_not_change_earlier_frames(vae):
    latents = 2 * hashed("latents", (6, 4, 2, 3))
    whole = vae.decode(latents)
    assert error(vae.decode(latents[:, :1]), whole[:, :1]) < BOUND
    assert error(vae.decode(latents[:, :3]), whole[:, :9]) < BOUND


def test_tiles_are_blended_as_diffusers_blends_them(vae):
    vae.tiling = TileConfig(3, 2)
    try:
        found = vae.decode(2 * hashed("tiles", (6, 2, 4, 6)))[:, [0, 3]]
    finally:
        vae.tiling = None
    # Where four tiles meet, diffusers blends a column that is blended already.
    meets = torch.zeros(found.shape[2:], dtype=torch.bool)
    meets[32:48, 32:48] = meets[32:48, 64:80] = True
    expected = torch.where(meets, found, GOLDEN["tiled"])
    assert error(found, expected) < BOUND
    assert error(found, GOLDEN["tiled"]) > 100 * BOUND
