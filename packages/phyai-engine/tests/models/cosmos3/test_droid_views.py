"""The picture that the released DROID policies see."""

import numpy as np
import pytest
import torch

from phyai.models.cosmos3.canvas import fit_canvas
from phyai.models.cosmos3.droid import Rounding, compose_views
from phyai.processing.errors import ProcessingError

from .droid_requests import picture, views


def test_wrist_on_top_and_halved_exteriors_below():
    request = views()
    composed = compose_views(request, Rounding.TRUNCATE)
    assert composed.shape == (1, 3, 540, 640)
    assert composed.dtype == torch.uint8
    frame = composed[0].permute(1, 2, 0).numpy()
    assert np.array_equal(frame[:360], request.wrist)
    for index, view in enumerate(request.exteriors):
        quads = view.reshape(180, 2, 320, 2, 3).astype(np.float64).mean((1, 3))
        half = frame[360:, 320 * index : 320 * (index + 1)]
        assert np.array_equal(half, np.trunc(quads).astype(np.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("rounding", Rounding)
def test_device_makes_the_same_picture(rounding):
    request = views()
    there = compose_views(request, rounding, "cuda")
    assert torch.equal(there.cpu(), compose_views(request, rounding))
    pixels, _ = fit_canvas(there, "480")
    expected, _ = fit_canvas(there.cpu(), "480")
    torch.testing.assert_close(pixels.cpu(), expected, rtol=0, atol=2e-7)


def test_rounding_differs_from_truncation_by_one_at_most():
    request = views()
    down, near = (compose_views(request, rounding).int() for rounding in Rounding)
    assert set((near - down).unique().tolist()) == {0, 1}


def test_composed_picture_is_taken_as_it_is():
    request = views(wrist=None, exteriors=None, image=picture(540, 640))
    composed = compose_views(request, Rounding.TRUNCATE)[0].permute(1, 2, 0)
    assert np.array_equal(composed.numpy(), request.image)


def test_other_sizes_are_resized():
    flat = np.full((720, 1280, 3), 201, np.uint8)
    small = np.full((90, 160, 3), 7, np.uint8)
    composed = compose_views(views(wrist=flat, exteriors=[small, small]), Rounding.TRUNCATE)
    assert (composed[0, :, :360] == 201).all()
    assert (composed[0, :, 360:] == 7).all()
    whole = compose_views(views(wrist=None, exteriors=None, image=flat[:33, :77]), Rounding.ROUND)
    assert whole.shape == (1, 3, 540, 640)
    assert (whole == 201).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wrist": None, "exteriors": None}, "got neither"),
        ({"image": picture(540, 640)}, "got both"),
        ({"wrist": None}, "got 0 and 2"),
        ({"exteriors": None}, "got 1 and 0"),
        ({"exteriors": [picture(360, 640)]}, "got 1 and 1"),
        ({"wrist": picture(360, 640)[..., 0]}, "'wrist'"),
        ({"exteriors": [picture(9, 9), np.zeros((9, 9, 4), np.uint8)]}, r"exteriors\[1\]"),
        ({"wrist": np.full((4, 4, 3), 255.0)}, "'wrist'"),
    ],
)
def test_bad_views_are_named(changes, message):
    with pytest.raises(ProcessingError, match=message):
        compose_views(views(**changes), Rounding.TRUNCATE)
