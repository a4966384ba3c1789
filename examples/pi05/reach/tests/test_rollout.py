import numpy as np
import pytest
from reach.chunks import CHUNK
from reach.env import ReachEnv
from reach.rollout import draw_rollout, record


def steady(observation, *, seed):
    return np.full((CHUNK, 2), 0.01, np.float32)


def test_recording_follows_the_episode():
    rollout = record(steady, seed=2, execute=5)
    env = ReachEnv()
    observation, _ = env.reset(seed=2)
    assert rollout.task == observation["task"]
    np.testing.assert_array_equal(rollout.path[0], observation["state"][:2])
    assert len(rollout.path) == 61
    assert not rollout.success
    assert [step for step, _ in rollout.plans] == list(range(0, 60, 5))
    for step, plan in rollout.plans:
        assert plan.shape == (CHUNK + 1, 2)
        np.testing.assert_allclose(plan[:6], rollout.path[step : step + 6], atol=1e-6)


def test_picture_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    from PIL import Image

    path = tmp_path / "rollout.png"
    draw_rollout(path, record(steady, seed=2), frames=3)
    pixels = np.asarray(Image.open(path).convert("RGB"))
    assert pixels.shape[1] > 2 * pixels.shape[0]
    path_blue = (np.abs(pixels.astype(int) - (0x2B, 0x4C, 0x9B)).sum(axis=2) < 12).sum()
    assert path_blue > 100


def test_too_few_frames_are_refused(tmp_path):
    with pytest.raises(ValueError, match="at least 2"):
        draw_rollout(tmp_path / "x.png", record(steady), frames=1)
