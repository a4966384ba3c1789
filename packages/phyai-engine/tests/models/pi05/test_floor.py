"""The least time of a chunk against numbers worked out by hand."""

import pytest

from phyai.models.pi05.floor import (
    Rates,
    floor_ms,
    prefix_operations,
    step_operations,
    vision_operations,
)
from phyai.models.pi05.random_weights import full_size_config

FULL = full_size_config()


def test_published_operation_counts():
    assert vision_operations(FULL, 3) == pytest.approx(0.6605e12, rel=1e-3)
    assert prefix_operations(FULL, 968) == pytest.approx(3.756e12, rel=1e-3)
    assert step_operations(FULL, 50, 968) == pytest.approx(38.65e9, rel=1e-3)


def test_published_floor_of_an_h200():
    found = floor_ms(FULL, views=3, prompt=200)
    expected = {"vision": 0.836, "prefix": 4.755, "denoise": 1.490, "total": 7.08}
    assert found == pytest.approx(expected, abs=2e-3)
    assert floor_ms(FULL, views=3, prompt=16)["total"] == pytest.approx(6.14, abs=0.01)
    assert floor_ms(FULL, views=3, prompt=200, batch=8)["total"] == pytest.approx(48.6, abs=0.1)


def test_narrow_weights_lower_only_what_memory_bounds():
    narrow = floor_ms(FULL, views=3, prompt=200, rates=Rates(790e12, 4.3e12, 0.5))
    wide = floor_ms(FULL, views=3, prompt=200)
    assert narrow["prefix"] == wide["prefix"]
    assert narrow["denoise"] == pytest.approx(0.489, abs=2e-3)
    assert floor_ms(FULL, views=3, prompt=200, steps=5)["denoise"] == wide["denoise"] / 2
