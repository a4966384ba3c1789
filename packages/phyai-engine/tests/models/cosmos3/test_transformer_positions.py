"""Positions and rotations; the constants of the released DROID policy's contract."""

import dataclasses
import math

import pytest
import torch

from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.positions import (
    Rotations,
    media_positions,
    rotary_axes,
    rotation,
    text_positions,
)
from phyai.models.cosmos3.state import ActionLayout, Layout

NANO = Cosmos3Config.nano()
STATE_ROW = ActionLayout(rows=33, start=0, clean_rows=(0,), raw_dim=8, domain_id=8)
DROID = Layout(frames=9, height=33, width=40, clean_frames=(0,), fps=15.0, action=STATE_ROW)
VIDEO_TOKENS = 3060


def test_tokens_of_the_policy():
    assert DROID.grid(2) == (9, 17, 20)
    assert DROID.tokens(2) == 3093
    assert len(DROID.noisy_frames) * 340 == 2720
    assert DROID.noisy_rows == tuple(range(1, 33))


@pytest.mark.parametrize("length", [82, 10])
def test_video_positions_of_the_policy(length):
    video = media_positions(DROID, length, NANO)[:VIDEO_TOKENS].view(9, 17, 20, 3)
    times = [0, 1.6, 3.2, 4.8, 6.4, 8.0, 9.6, 11.2, 12.8]
    expected = length + 15000 + torch.tensor(times)
    assert torch.equal(video[..., 0], expected[:, None, None].expand(9, 17, 20))
    assert torch.equal(video[0, :, 0, 1], torch.arange(17.0))
    assert torch.equal(video[8, 16, :, 2], torch.arange(20.0))


@pytest.mark.parametrize(("start", "rows"), [(0, 33), (1, 32), (-3, 36)])
def test_action_positions_of_the_policy(start, rows):
    action = dataclasses.replace(STATE_ROW, rows=rows, start=start)
    found = media_positions(dataclasses.replace(DROID, action=action), 82, NANO)[VIDEO_TOKENS:]
    times = 15082 + torch.arange(start, start + rows) / 15.0 * 6.0
    assert torch.equal(found[:, 0], times)
    assert not found[:, 1:].any()
    if start <= 0:
        # The row 4 f steps after the state stands beside latent frame f.
        frames = media_positions(DROID, 82, NANO)[:VIDEO_TOKENS].view(9, 340, 3)[:, 0, 0]
        torch.testing.assert_close(found[-start::4, 0], frames, rtol=0, atol=2e-3)


def test_sound_has_a_rate_of_its_own():
    layout = dataclasses.replace(DROID, action=None, sound_frames=55)
    sound = media_positions(layout, 7, NANO)[VIDEO_TOKENS:]
    assert torch.equal(sound[:, 0], torch.arange(55.0) / 25 * 24 + 15007)
    assert not sound[:, 1:].any()


def test_without_a_rate_frames_and_rows_are_numbered():
    layout = dataclasses.replace(DROID, fps=None)
    unmodulated = dataclasses.replace(NANO, enable_fps_modulation=False)
    for config in (NANO, unmodulated):
        found = media_positions(layout, 7, config)
        assert torch.equal(found[:VIDEO_TOKENS:340, 0], torch.arange(9.0) + 15007)
        assert torch.equal(found[VIDEO_TOKENS:, 0], torch.arange(33.0) + 15007)
    sound = dataclasses.replace(layout, fps=15.0, sound_frames=3, action=None)
    assert torch.equal(
        media_positions(sound, 7, unmodulated)[VIDEO_TOKENS:, 0], torch.arange(3.0) + 15007
    )


def test_axes_are_interleaved():
    axes = rotary_axes(NANO).tolist()
    assert [slot for slot, axis in enumerate(axes) if axis == 1] == list(range(1, 59, 3))
    assert [slot for slot, axis in enumerate(axes) if axis == 2] == list(range(2, 60, 3))
    assert axes[60:] == [0, 0, 0, 0]


def test_rotations_against_a_loop_in_double_precision():
    config = Cosmos3Config.tiny()
    positions = torch.tensor([[15082.4, 3.0, 11.0], [0.0, 0.0, 0.0], [15009.6, 16.0, 19.0]])
    found = rotation(positions, config)
    assert found.dtype == torch.float32
    for token, place in enumerate(positions.tolist()):
        for slot, axis in enumerate(rotary_axes(config).tolist()):
            angle = place[axis] * config.rope_theta ** (-2 * slot / config.head_dim)
            # fp32 angles of 15000 are off by up to half a step of 2^-10.
            assert math.isclose(found[token, slot].item(), math.cos(angle), abs_tol=1e-3)
            assert math.isclose(found[token, slot + 8].item(), math.sin(angle), abs_tol=1e-3)


def test_text_positions_are_equal_on_all_axes():
    assert torch.equal(text_positions(3), torch.tensor([[0.0] * 3, [1.0] * 3, [2.0] * 3]))


def test_rotations_are_kept_for_the_layouts_used_last():
    rotations = Rotations(Cosmos3Config.tiny(), torch.device("cpu"))
    layout = Layout(frames=2, height=3, width=4)
    first = rotations.media(layout, 5)
    assert rotations.media(Layout(2, 3, 4), 5) is first
    assert not torch.equal(rotations.media(layout, 6), first)
    for length in range(7, 14):
        rotations.media(layout, length)
    again = rotations.media(layout, 5)
    assert again is not first
    assert torch.equal(again, first)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout(0, 4, 4), "frames is 0; it must be at least 1"),
        (lambda: Layout(1, 4, 4, clean_frames=(1,)), r"clean_frames is \(1,\); allowed: 0 to 0"),
        (lambda: Layout(1, 4, 4, fps=0.0), "fps is 0.0; it must be a positive number or None"),
        (lambda: Layout(1, 4, 4, fps=math.nan), "fps is nan"),
        (lambda: Layout(1, 4, 4, sound_frames=-1), "sound_frames is -1"),
        (lambda: ActionLayout(0, 1, (), 8, 0), "rows is 0"),
        (lambda: ActionLayout(4, 1, (-1,), 8, 0), r"clean_rows is \(-1,\); allowed: 0 to 3"),
        (lambda: ActionLayout(4, 1, (), 0, 0), "raw_dim is 0"),
        (lambda: ActionLayout(4, 1, (), 8, -2), "domain_id is -2"),
    ],
)
def test_impossible_layouts_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_equal_layouts_are_one_key():
    one = Layout(3, 4, 4, clean_frames=(2, 0, 0), fps=24)
    other = Layout(3, 4, 4, clean_frames=(0, 2), fps=24.0)
    assert one == other
    assert hash(one) == hash(other)
    assert one.noisy_frames == (1,)
