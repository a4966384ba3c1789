"""Starting points: the model owner's generator, that of diffusers, and what is clean."""

import numpy as np
import pytest
import torch

from phyai.models.cosmos3.noise import (
    NoiseSource,
    check_noise,
    draw_noise,
    native_noise,
    runs,
    start,
    torch_noise,
)
from phyai.models.cosmos3.state import ActionLayout, Layout, Modalities
from phyai.processing.errors import ProcessingError

LAYOUT = Layout(3, 5, 2, (0, 2), 15.0, ActionLayout(7, 0, (0, 1, 4), 3, 2), sound_frames=4)
WIDTHS = (6, 5)


def test_native_noise_starts_anew_for_every_modality():
    noise = native_noise(42, 4, LAYOUT, WIDTHS)
    for part, shape in ((noise.video, (4, 3, 5, 2)), (noise.action, (7, 6)), (noise.sound, (5, 4))):
        expected = np.random.RandomState(42).standard_normal(shape).astype(np.float32)
        assert np.array_equal(part.numpy(), expected)
    assert torch.equal(noise.action.flatten(), noise.video.flatten()[:42])


def test_native_noise_of_actions_longer_than_the_video():
    layout = Layout(1, 1, 1, (), 15.0, ActionLayout(9, 1, (), 3, 2))
    noise = native_noise(3, 2, layout, WIDTHS)
    assert noise.sound is None
    expected = np.random.RandomState(3).standard_normal((9, 6)).astype(np.float32)
    assert np.array_equal(noise.action.numpy(), expected)


def test_torch_noise_is_one_stream_of_video_sound_actions():
    noise = torch_noise(7, 4, LAYOUT, WIDTHS)
    generator = torch.Generator().manual_seed(7)
    assert torch.equal(noise.video, torch.randn(4, 3, 5, 2, generator=generator))
    assert torch.equal(noise.sound, torch.randn(5, 4, generator=generator))
    assert torch.equal(noise.action, torch.randn(7, 6, generator=generator))


def test_start_writes_what_is_clean_and_clears_unused_channels():
    noise = native_noise(0, 4, LAYOUT, WIDTHS)
    before = noise.map(torch.clone)
    frames, rows = torch.full((4, 2, 5, 2), 7.0), torch.full((3, 6), 8.0)
    frames[:, 1] = 9.0
    rows[:, 3:] = 0
    rows[2] = torch.tensor([5.0, 6.0, 7.0, 0, 0, 0])
    state = start(noise, LAYOUT, frames=frames, rows=rows)
    assert (state.video[:, 0] == 7).all()
    assert (state.video[:, 2] == 9).all()
    assert torch.equal(state.video[:, 1], noise.video[:, 1])
    assert (state.action[:2, :3] == 8).all()
    assert state.action[4, :3].tolist() == [5, 6, 7]
    assert torch.equal(state.action[[2, 3, 5, 6], :3], noise.action[[2, 3, 5, 6], :3])
    assert not state.action[:, 3:].any()
    assert torch.equal(state.sound, noise.sound)
    for name in ("video", "action", "sound"):
        assert torch.equal(getattr(noise, name), getattr(before, name)), "noise was written to"


@pytest.mark.gpu
def test_the_host_never_waits_for_the_start():
    noise = native_noise(0, 4, LAYOUT, WIDTHS)
    frames, rows = torch.full((4, 2, 5, 2), 7.0), torch.arange(18.0).view(3, 6)
    there, given = noise.map(torch.Tensor.cuda), frames.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        state = start(there, LAYOUT, frames=given, rows=rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = start(noise, LAYOUT, frames=frames, rows=rows)
    for found, wanted in zip(state.parts, expected.parts, strict=True):
        assert torch.equal(found.cpu(), wanted)


def test_start_refuses_values_that_are_not_one_for_each_clean_place():
    noise = native_noise(0, 4, LAYOUT, WIDTHS)
    for count in (1, 3):
        with pytest.raises(RuntimeError, match="split"):
            start(noise, LAYOUT, frames=torch.zeros(4, count, 5, 2), rows=None)


def test_runs_of_indices():
    assert runs(()) == ()
    assert runs((0, 1, 2)) == (slice(0, 3),)
    assert runs((5, 0, 1, 3)) == (slice(0, 2), slice(3, 4), slice(5, 6))


@pytest.mark.parametrize(
    ("kind", "seed", "message"),
    [
        ("numpy", 0, "noise is 'numpy'; allowed: native, torch"),
        ("native", -1, "seed is -1; allowed: integers from 0 to 4294967295"),
        ("torch", 2**32, "seed is 4294967296"),
        ("native", 1.5, "seed is 1.5"),
        ("native", True, "seed is True"),
    ],
)
def test_bad_settings_are_named(kind, seed, message):
    with pytest.raises(ProcessingError, match=message):
        draw_noise(kind, seed, 4, LAYOUT, WIDTHS)


def test_source_keeps_the_last_draws():
    source = NoiseSource(4, WIDTHS, torch.device("cpu"))
    ahead = source.prepare("native", 1, LAYOUT)
    assert torch.equal(
        source.get("native", 1, LAYOUT).sound, native_noise(1, 4, LAYOUT, WIDTHS).sound
    )
    assert source.prepare("native", 1, LAYOUT) is ahead
    assert source.prepare("torch", 1, LAYOUT) is not ahead
    assert source.prepare("native", 1, LAYOUT) is ahead
    source.prepare("native", 2, LAYOUT)
    source.prepare("native", 3, LAYOUT)
    assert source.prepare("native", 1, LAYOUT) is not ahead
    half = source.checked(ahead.map(torch.Tensor.double), LAYOUT)
    assert half.action.dtype == torch.float32


@pytest.mark.gpu
def test_source_of_a_device_waits_in_pinned_memory():
    source = NoiseSource(4, WIDTHS, torch.device("cuda"))
    assert source.prepare("native", 1, LAYOUT).video.is_pinned()
    there = source.get("native", 1, LAYOUT)
    assert there.sound.is_cuda
    assert torch.equal(there.video.cpu(), native_noise(1, 4, LAYOUT, WIDTHS).video)


def test_given_noise_must_fit():
    noise = native_noise(0, 4, LAYOUT, WIDTHS)
    check_noise(noise, 4, LAYOUT, WIDTHS)
    silent = Modalities(noise.video, noise.action, None)
    with pytest.raises(ProcessingError, match=r"sound of shape None; this request needs \(5, 4\)"):
        check_noise(silent, 4, LAYOUT, WIDTHS)
    short = Modalities(noise.video[:, :2], noise.action, noise.sound)
    with pytest.raises(ProcessingError, match=r"needs \(4, 3, 5, 2\)"):
        check_noise(short, 4, LAYOUT, WIDTHS)
    still = Layout(3, 5, 2, (), 15.0)
    with pytest.raises(ProcessingError, match=r"action of shape \(7, 6\); this request needs None"):
        check_noise(noise, 4, still, WIDTHS)
