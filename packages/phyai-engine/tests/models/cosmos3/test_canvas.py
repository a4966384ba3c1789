"""Pictures on their way to the VAE."""

import numpy as np
import pytest
import torch
from PIL import Image

from phyai.models.cosmos3.canvas import (
    content_cells,
    cover_canvas,
    fit_canvas,
    scaled,
    to_frames,
    to_uint8,
)
from phyai.models.cosmos3.domains import TIERS, find_canvas
from phyai.processing.errors import ProcessingError


def picture(height, width, frames=1, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), np.uint8)


def test_tiers_as_published():
    sizes = {tier: {f"{w}x{h}" for h, w in sizes.values()} for tier, sizes in TIERS.items()}
    assert sizes == {
        "256": {"256x256", "320x256", "256x320", "320x192", "192x320"},
        "480": {"640x640", "736x544", "544x736", "832x480", "480x832"},
        "704": {"960x960", "1088x832", "832x1088", "1280x704", "704x1280"},
        "720": {"960x960", "1104x832", "832x1104", "1280x720", "720x1280"},
    }
    for sizes_of_tier in TIERS.values():
        for name, (height, width) in sizes_of_tier.items():
            across, down = map(int, name.split(","))
            assert abs(width / height - across / down) < 0.13, name
            assert not height % 16
            assert not width % 16


def test_nearest_canvas():
    assert find_canvas("480", 540, 640) == (544, 736)
    assert find_canvas("256", 100, 150) == (192, 320)
    assert find_canvas("256", 1, 1000) == (192, 320)
    with pytest.raises(ProcessingError, match="tier is '512'; allowed: 256, 480, 704, 720"):
        find_canvas("512", 1, 1)


def test_droid_picture_is_padded_by_reflection():
    frames = to_frames(picture(540, 640), "image")
    pixels, content = fit_canvas(frames, "480")
    assert content == (540, 640)
    assert pixels.shape == (3, 1, 544, 736)
    assert torch.equal(pixels[:, 0, :540, :640], frames[0] / 127.5 - 1)
    for row in range(4):
        assert torch.equal(pixels[:, :, 540 + row], pixels[:, :, 538 - row])
    for column in range(96):
        assert torch.equal(pixels[..., 640 + column], pixels[..., 638 - column])
    assert content_cells(content) == (33, 40)


def test_small_pictures_are_never_scaled_up_and_padded_by_their_edge():
    frames = to_frames(picture(20, 30, 3), "clip")
    pixels, content = fit_canvas(frames, "256")
    assert pixels.shape == (3, 3, 192, 320)
    assert content == (20, 30)
    assert torch.equal(pixels[..., 30:], pixels[..., 29:30].expand(3, 3, 192, 290))
    assert torch.equal(pixels[:, :, 20:], pixels[:, :, 19:20].expand(3, 3, 172, 320))
    assert content_cells((20, 30)) == (1, 1)
    assert content_cells((5, 15)) == (1, 1)


def test_large_pictures_are_scaled_down_with_antialiasing():
    frames = to_frames(picture(500, 751), "image")
    pixels, content = fit_canvas(frames, "256")
    assert content == (192, 288)
    source = Image.fromarray(frames[0].permute(1, 2, 0).numpy())
    expected = torch.from_numpy(np.array(source.resize((288, 192), Image.Resampling.BICUBIC)))
    error = (pixels[:, 0, :192, :288] - scaled(expected).permute(2, 0, 1)).abs()
    # Pillow rounds and cuts to 8 bits between its passes.
    assert error.mean() < 0.01


def test_cover_crops_the_centre():
    frames = to_frames(picture(32, 96), "image")
    pixels = cover_canvas(frames, (32, 32))
    assert torch.equal(pixels[:, 0], scaled(frames[0, :, :, 32:64]))
    tall = cover_canvas(to_frames(picture(100, 31), "image"), (48, 64))
    assert tall.shape == (3, 1, 48, 64)
    values = (tall + 1) * 127.5
    torch.testing.assert_close(values, values.round(), rtol=0, atol=1e-4)


def test_cover_scales_both_ways():
    flat = np.full((1, 10, 20, 3), 77, np.uint8)
    for canvas in ((64, 32), (4, 4), (10, 20)):
        pixels = cover_canvas(to_frames(flat, "image"), canvas)
        torch.testing.assert_close(pixels, torch.full((3, 1, *canvas), 77 / 127.5 - 1))


def test_uint8_round_trip():
    frames = to_frames(picture(7, 5, 2), "clip")
    again = to_uint8(scaled(frames).transpose(0, 1))
    assert np.array_equal(again, frames.permute(0, 2, 3, 1).numpy())
    assert to_uint8(torch.tensor([-9.0, 9.0]).view(1, 2, 1, 1)).ravel().tolist() == [0, 255]
    assert to_uint8(torch.zeros(3, 1, 2, 2, dtype=torch.bfloat16)).dtype == np.uint8


@pytest.mark.parametrize(
    ("clip", "message"),
    [
        (np.zeros((4, 4, 3), np.uint8), "must be a clip of frames"),
        ([], "got nothing"),
        ([5], "items of int"),
        ([np.zeros((4, 4, 3), np.uint8), np.zeros((4, 5, 3), np.uint8)], "several sizes"),
        (np.zeros((2, 4, 4, 4), np.uint8), r"clip\[0\]"),
        (np.full((1, 4, 4, 3), 7.0), r"\[0, 1\]"),
    ],
)
def test_bad_clips_are_named(clip, message):
    with pytest.raises(ProcessingError, match=message):
        to_frames(clip, "clip")


def test_layouts_and_floats():
    source = picture(6, 9)
    planar = source.transpose(0, 3, 1, 2)
    assert torch.equal(to_frames(planar, "a"), to_frames(source, "a"))
    assert torch.equal(to_frames(source / 255.0, "a"), to_frames(source, "a"))
    assert torch.equal(to_frames(list(source), "a"), to_frames(source, "a"))
    assert torch.equal(to_frames(source[:, ::-1], "a"), to_frames(source, "a").flip(2))
