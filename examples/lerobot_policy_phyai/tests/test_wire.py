"""Batches of LeRobot as requests."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

SOURCE = Path(__file__).resolve().parents[1] / "src" / "lerobot_policy_phyai"
sys.path.append(str(SOURCE))
import wire  # noqa: E402  # the package itself needs LeRobot


def test_every_row_is_a_request_with_the_pixels_of_the_camera():
    pixels = torch.arange(2 * 3 * 4 * 5).remainder(256).to(torch.uint8).view(2, 3, 4, 5)
    batch = {
        "observation.images.base": pixels.float() / 255,
        "observation.images.wrist": pixels,
        "observation.state": torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64),
        "task": ["one", "two"],
        "action": None,
    }
    first, second = wire.requests_of(batch)
    assert (first["prompt"], second["prompt"]) == ("one", "two")
    assert second["observation.state"].tolist() == [3.0, 4.0]
    for name in ("base", "wrist"):
        frame = second["images"][f"observation.images.{name}"]
        np.testing.assert_array_equal(frame, pixels[1].numpy())


def test_one_task_is_for_all_rows_and_other_numbers_are_errors():
    batch = {"observation.state": torch.zeros(2, 1), "task": "go"}
    assert [request["prompt"] for request in wire.requests_of(batch)] == ["go", "go"]
    with pytest.raises(ValueError, match="2 observations and 3 tasks"):
        wire.requests_of(batch | {"task": ["a", "b", "c"]})
    with pytest.raises(ValueError, match=r"no 'observation\.state'; it has: task"):
        wire.requests_of({"task": "go"})


def test_the_rest_of_a_chunk_loses_its_padding():
    left = torch.tensor([[1.0, 0.0], [0.0, 0.0], [2.0, 3.0], [0.0, 0.0]])
    (option,) = wire.rtc_options(3, left, 10, "LINEAR")
    assert option["prev"].tolist() == [[1, 0], [0, 0], [2, 3]]
    assert {key: option[key] for key in ("delay", "horizon", "schedule")} == {
        "delay": 3,
        "horizon": 10,
        "schedule": "linear",
    }
    assert wire.rtc_options(None, None, None, None) is None
    both = wire.rtc_options(None, torch.zeros(2, 3, 1), None, None)
    assert [item["prev"].shape for item in both] == [(1, 1), (1, 1)]
    assert "horizon" not in both[0]
