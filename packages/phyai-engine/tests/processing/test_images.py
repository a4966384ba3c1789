import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate, pad

from phyai.processing.errors import ProcessingError
from phyai.processing.images import ResizeFilter, letterbox_geometry, prepare_image

TARGET = (224, 224)
GEOMETRY = [
    # height, width, new height, new width, (top, bottom), (left, right)
    (480, 640, 168, 224, (28, 28), (0, 0)),
    (720, 1280, 126, 224, (49, 49), (0, 0)),
    (1080, 1920, 126, 224, (49, 49), (0, 0)),
    (360, 640, 126, 224, (49, 49), (0, 0)),
    (640, 480, 224, 168, (0, 0), (28, 28)),
    (400, 640, 140, 224, (42, 42), (0, 0)),
    (376, 672, 125, 224, (49, 50), (0, 0)),
    (256, 256, 224, 224, (0, 0), (0, 0)),
    (224, 224, 224, 224, (0, 0), (0, 0)),
]
SIZES = [case[:2] for case in GEOMETRY] + [(1, 1), (223, 225), (101, 37), (7, 224), (224, 7)]


def frame(height: int, width: int) -> np.ndarray:
    rng = np.random.default_rng(height * 10_000 + width)
    return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)


def pil_reference(image: np.ndarray) -> np.ndarray:
    """The letterbox of openpi's client, in whole pixels."""
    height, width = image.shape[:2]
    ratio = max(width / 224, height / 224)
    new_height, new_width = int(height / ratio), int(width / ratio)
    small = Image.fromarray(image).resize((new_width, new_height), Image.Resampling.BILINEAR)
    canvas = Image.new("RGB", (224, 224), 0)
    canvas.paste(small, (int((224 - new_width) / 2), int((224 - new_height) / 2)))
    return np.asarray(canvas)


def interpolate_reference(image: np.ndarray, value: float) -> torch.Tensor:
    """The letterbox of LeRobot: pad 0 in [0, 1] for -1, pad -1 before scaling for -3."""
    pixels = torch.from_numpy(image.astype(np.float32) / 255).permute(2, 0, 1)[None]
    height, width = image.shape[:2]
    ratio = max(width / 224, height / 224)
    size = (int(height / ratio), int(width / ratio))
    small = interpolate(pixels, size=size, mode="bilinear", align_corners=False)
    top, extra_rows = divmod(224 - size[0], 2)
    left, extra_columns = divmod(224 - size[1], 2)
    margins = (left, left + extra_columns, top, top + extra_rows)
    return (pad(small, margins, value=(value + 1) / 2) * 2 - 1)[0]


@pytest.mark.parametrize(("height", "width", "rows", "columns", "vertical", "horizontal"), GEOMETRY)
def test_geometry(height, width, rows, columns, vertical, horizontal):
    box = letterbox_geometry(height, width, *TARGET)
    assert (box.height, box.width) == (rows, columns)
    assert (box.top, box.bottom) == vertical
    assert (box.left, box.right) == horizontal


@pytest.mark.parametrize("size", [(1, 5000), (5000, 1)])
def test_extreme_aspects_keep_one_pixel(size):
    box = letterbox_geometry(*size, *TARGET)
    assert min(box.height, box.width) == 1
    assert prepare_image(frame(*size), TARGET, resize=ResizeFilter.PIL).shape == (3, 224, 224)


@pytest.mark.parametrize("size", SIZES)
def test_pil_filter(size):
    image = frame(*size)
    result = prepare_image(image, TARGET, resize=ResizeFilter.PIL)
    pixels = ((result + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).numpy()
    assert np.array_equal(pixels, pil_reference(image))
    expected = torch.from_numpy(pil_reference(image).copy()).permute(2, 0, 1) / 255.0 * 2.0 - 1.0
    assert torch.equal(result, expected)


@pytest.mark.parametrize("value", [-1.0, -3.0])
@pytest.mark.parametrize("size", SIZES)
def test_interpolate_filter(size, value):
    image = frame(*size)
    result = prepare_image(image, TARGET, resize=ResizeFilter.INTERPOLATE, pad_value=value)
    assert torch.allclose(result, interpolate_reference(image, value), atol=1e-6, rtol=0)


def test_filters_differ_when_shrinking():
    image = frame(480, 640)
    pil = prepare_image(image, TARGET, resize=ResizeFilter.PIL)
    plain = prepare_image(image, TARGET, resize=ResizeFilter.INTERPOLATE)
    assert (pil - plain).abs().max() > 0.3


def test_letterbox_margins_carry_the_pad_value():
    result = prepare_image(frame(376, 672), TARGET, resize=ResizeFilter.INTERPOLATE, pad_value=-3.0)
    assert (result[:, :49] == -3).all()
    assert (result[:, 174:] == -3).all()
    assert (result[:, 49:174] >= -1).all()


def test_stretch_ignores_the_aspect():
    image = frame(101, 37)
    pixels = torch.from_numpy(image / np.float32(255)).permute(2, 0, 1)[None]
    expected = interpolate(pixels, size=TARGET, mode="bilinear", align_corners=False)[0] * 2 - 1
    result = prepare_image(image, TARGET, resize=ResizeFilter.STRETCH)
    assert torch.allclose(result, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("resize", list(ResizeFilter))
def test_a_frame_of_the_right_size_is_only_scaled(resize):
    image = frame(28, 30)
    result = prepare_image(image, (28, 30), resize=resize, pad_value=-3.0)
    expected = torch.from_numpy(image).permute(2, 0, 1) / 255.0 * 2.0 - 1.0
    assert torch.equal(result, expected)
    assert result.dtype == torch.float32


@pytest.mark.parametrize("resize", [ResizeFilter.PIL, ResizeFilter.INTERPOLATE])
@pytest.mark.parametrize(
    "convert",
    [
        lambda image: image.transpose(2, 0, 1),
        lambda image: np.ascontiguousarray(image.transpose(2, 0, 1)),
        lambda image: image.astype(np.float32) / 255,
        lambda image: image.astype(np.float64).transpose(2, 0, 1) / 255,
        lambda image: np.ascontiguousarray(image[::-1, ::-1])[::-1, ::-1],
        lambda image: np.repeat(image, 2, axis=1)[:, ::2],
    ],
    ids=["chw-view", "chw", "float", "float64-chw", "negative-strides", "strided"],
)
def test_layouts_and_dtypes_mean_the_same_picture(resize, convert):
    image = frame(53, 31)
    expected = prepare_image(image, TARGET, resize=resize)
    assert torch.allclose(
        prepare_image(convert(image), TARGET, resize=resize), expected, atol=1e-6, rtol=0
    )


def test_float16_frames_are_accepted():
    image = np.full((4, 4, 3), 0.5, dtype=np.float16)
    assert (prepare_image(image, (4, 4), resize=ResizeFilter.NONE) == 0).all()


@pytest.mark.parametrize("size", [(28, 28), (3, 5)])
def test_read_only_frames_cause_no_warning_and_stay_unchanged(size, request):
    request.addfinalizer(lambda: torch.set_warn_always(False))
    torch.set_warn_always(True)
    image = frame(*size)
    before = image.copy()
    image.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for resize in (ResizeFilter.PIL, ResizeFilter.INTERPOLATE, ResizeFilter.STRETCH):
            prepare_image(image, (28, 28), resize=resize)
            prepare_image(image.transpose(2, 0, 1), (28, 28), resize=resize)
    assert np.array_equal(image, before)


def test_three_rows_of_an_hwc_frame_are_rows():
    image = frame(3, 9)
    result = prepare_image(image, (3, 9), resize=ResizeFilter.NONE)
    assert torch.equal(result, torch.from_numpy(image).permute(2, 0, 1) / 255.0 * 2.0 - 1.0)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((8, 8), np.uint8), r"'wrist'.*\(8, 8\) is a grayscale"),
        (np.zeros((8, 8, 1), np.uint8), "one channel"),
        (np.zeros((1, 8, 8), np.uint8), "one channel"),
        (np.zeros((8, 8, 4), np.uint8), "four channels; drop the alpha"),
        (np.zeros((4, 8, 8), np.uint8), "four channels"),
        (np.zeros((8, 8, 5), np.uint8), "no axis of 3 colour channels"),
        (np.zeros((1, 8, 8, 3), np.uint8), "batch of frames"),
        (np.zeros(8, np.uint8), "no frame"),
        (np.zeros((0, 8, 3), np.uint8), "no pixels"),
        (np.zeros((8, 8, 3), np.int32), "int32.*uint8 in .0, 255."),
        (np.zeros((8, 8, 3), bool), "bool"),
        (np.full((8, 8, 3), 200.0), r"spans \[200, 200\]"),
        (np.full((8, 8, 3), -1.0), r"\[-1, -1\]"),
        (np.full((8, 8, 3), np.nan), "nan"),
    ],
)
def test_frames_that_are_refused(image, message):
    with pytest.raises(ProcessingError, match=message):
        prepare_image(image, TARGET, resize=ResizeFilter.PIL, name="wrist")


def test_float_overshoot_of_a_resize_is_clipped():
    image = np.full((4, 4, 3), 1.0005, dtype=np.float32)
    assert (prepare_image(image, (4, 4), resize=ResizeFilter.NONE) == 1).all()


def test_floats_are_rounded_to_the_nearest_pixel_value():
    image = np.full((6, 6, 3), 100.7 / 255, dtype=np.float32)
    result = prepare_image(image, (3, 3), resize=ResizeFilter.PIL)
    assert torch.allclose(result, torch.tensor(101 / 255 * 2 - 1), atol=1e-6)


def test_no_resize_refuses_other_sizes():
    with pytest.raises(ProcessingError, match=r"5x6 but the policy reads 224x224.*does not resize"):
        prepare_image(frame(5, 6), TARGET, resize=ResizeFilter.NONE)
