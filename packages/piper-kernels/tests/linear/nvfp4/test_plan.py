import itertools

import pytest

from piper_kernels._triton.targets import AcceleratorTarget
from piper_kernels.linear.nvfp4._plan import (
    ARRANGEMENT,
    DECODED_ROWS,
    STREAMED_ROWS,
    plan_product,
)

HOPPER = AcceleratorTarget("cuda", "sm_90")
TARGETS = [None, HOPPER, *(AcceleratorTarget("cuda", f"sm_{n}") for n in (80, 89, 120))] + [
    AcceleratorTarget("hip", name) for name in ("gfx942", "gfx1201")
]


def test_plans_fit_every_target_and_shape():
    shapes = itertools.product((1, 7, 16, 17, 64, 65, 100_000), (1, 64, 28672), (16, 64, 8192))
    for target, shape, size in itertools.product(TARGETS, shapes, (2, 4)):
        plan = plan_product(target, 132, *shape, size)
        rows, _, features = shape
        if plan.decoded:
            assert target.backend == "cuda"
            assert (rows, size) >= (DECODED_ROWS, 2)
            continue
        assert plan.depth % ARRANGEMENT == 0
        assert plan.rows & (plan.rows - 1) == 0
        assert (plan.arrangement == ARRANGEMENT) == (rows > STREAMED_ROWS)
        assert 1 <= plan.splits <= max(1, features // plan.depth)
        assert plan.arrangement or plan.rows >= rows


@pytest.mark.parametrize(
    ("outputs", "features", "splits"),
    [(8192, 8192, 4), (28672, 8192, 1), (1024, 4096, 8), (64, 16384, 16), (65536, 8192, 1)],
)
def test_few_rows_fill_the_processors(outputs, features, splits):
    assert plan_product(HOPPER, 132, 16, outputs, features, 2).splits == splits


@pytest.mark.parametrize(("rows", "splits"), [(65, 4), (200, 2), (319, 1)])
def test_the_depth_of_tiles_is_split_while_there_are_few(rows, splits):
    assert plan_product(HOPPER, 132, rows, 8192, 8192, 2).splits == splits
    assert plan_product(HOPPER, 132, rows, 8192, 64, 2).splits == 1


@pytest.mark.parametrize("rows", [DECODED_ROWS, 8192])
def test_many_rows_decode_the_weight_once(rows):
    assert plan_product(HOPPER, 132, rows, 8192, 8192, 2).decoded
    assert not plan_product(HOPPER, 132, rows, 8192, 8192, 4).decoded
    assert not plan_product(HOPPER, 132, DECODED_ROWS - 1, 8192, 8192, 2).decoded
    assert not plan_product(AcceleratorTarget("hip", "gfx942"), 132, rows, 8192, 8192, 2).decoded
