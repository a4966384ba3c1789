"""The least time of a request against numbers worked out by hand."""

import pytest

from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.floor import (
    H200_8BIT,
    attention_operations,
    floor_ms,
    layer_parameters,
    linear_operations,
    text_bytes,
)
from phyai.models.cosmos3.sampler import Sampling
from phyai.models.cosmos3.state import ActionLayout, Layout

NANO, EDGE = Cosmos3Config.nano(), Cosmos3Config.edge()
ACTION = ActionLayout(33, 0, (0,), 8, 8)
DROID = Layout(9, 33, 40, clean_frames=(0,), fps=15.0, action=ACTION)
SAMPLING = Sampling(4, 3.0, 5.0)
CANVAS = (544, 736)


def test_sizes():
    tokens = DROID.tokens(NANO.latent_patch_size)
    assert tokens == 3093
    assert layer_parameters(NANO) == 41_943_040 + 150_994_944
    assert linear_operations(NANO, tokens) == pytest.approx(42.97e12, rel=1e-3)
    assert attention_operations(NANO, tokens, 46) == pytest.approx(5.73e12, rel=1e-3)
    assert linear_operations(EDGE, tokens) == pytest.approx(8.72e12, rel=1e-3)
    assert attention_operations(EDGE, tokens, 46) == pytest.approx(2.23e12, rel=2e-3)
    assert text_bytes(NANO) == pytest.approx(13.5e9, rel=1e-2)
    long = Layout(48, 45, 80)
    assert long.tokens(2) == 44_160
    assert attention_operations(NANO, 44_160, 0) == pytest.approx(1150e12, rel=1e-2)


def test_published_floor_of_the_policy():
    found = floor_ms(NANO, DROID, SAMPLING, (82, 10), canvas=CANVAS)
    assert found == pytest.approx(
        {"encode": 2.37, "prefill": 0.0, "denoise": 494.3, "total": 496.6}, abs=0.2
    )
    narrow = floor_ms(NANO, DROID, SAMPLING, (82, 10), canvas=CANVAS, rates=H200_8BIT)
    assert narrow["denoise"] == pytest.approx(316, abs=1)
    fresh = floor_ms(NANO, DROID, SAMPLING, (82, 10), cached=False)
    assert fresh["prefill"] == pytest.approx(3.2, abs=0.1)
    assert fresh["encode"] == 0


def test_an_interval_guides_some_steps_only():
    whole = floor_ms(EDGE, DROID, SAMPLING, (82, 10))
    first = floor_ms(EDGE, DROID, Sampling(4, 3.0, 5.0, interval=(960, 1001)), (82, 10))
    alone = floor_ms(EDGE, DROID, Sampling(4, 1.0, 5.0), (82,))
    assert first["denoise"] / whole["denoise"] == pytest.approx(5 / 8, rel=1e-2)
    assert alone["denoise"] / whole["denoise"] == pytest.approx(4 / 8, rel=1e-2)
    assert first["denoise"] == pytest.approx(69, abs=2)
