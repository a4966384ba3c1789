"""Camera pictures, camera options and states of the command line."""

import numpy as np
import pytest
from PIL import Image

from phyai.cli.errors import CliError
from phyai.cli.images import parse_images, parse_state, read_image


def pixels(height: int, width: int, channels: int = 3) -> np.ndarray:
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(3).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (7, 1), (13, 29)])
def test_an_rgb_png_arrives_unchanged(tmp_path, height, width):
    expected = pixels(height, width)
    Image.fromarray(expected).save(tmp_path / "a.png")
    seen = read_image(tmp_path / "a.png")
    assert seen.dtype == np.uint8
    np.testing.assert_array_equal(seen, expected)


# EXIF orientation -> what turns the stored pixels upright, written with numpy.
UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: a.transpose(1, 0, 2)[:, ::-1],
    7: lambda a: a.transpose(1, 0, 2)[::-1, ::-1],
    8: lambda a: a.transpose(1, 0, 2)[::-1],
}


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_exif_orientation_is_applied(tmp_path, orientation):
    stored = pixels(5, 9)
    image = Image.fromarray(stored)
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(tmp_path / "a.png", exif=exif)
    np.testing.assert_array_equal(read_image(tmp_path / "a.png"), UPRIGHT[orientation](stored))


def test_grey_palette_and_cmyk_become_rgb(tmp_path):
    grey = pixels(6, 5, 1)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    np.testing.assert_array_equal(read_image(tmp_path / "grey.png"), np.stack([grey] * 3, -1))
    palette = Image.new("P", (4, 3), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    palette.save(tmp_path / "palette.gif")
    assert (read_image(tmp_path / "palette.gif") == [10, 20, 30]).all()
    Image.new("CMYK", (4, 3), (0, 255, 255, 0)).save(tmp_path / "cmyk.tiff")
    assert (read_image(tmp_path / "cmyk.tiff") == [255, 0, 0]).all()


def test_transparency_is_laid_over_black(tmp_path):
    rgba = np.zeros((2, 3, 4), np.uint8)
    rgba[..., 0] = 200
    rgba[0, :, 3] = 255
    rgba[1, 0, 3] = 51
    Image.fromarray(rgba).save(tmp_path / "a.png")
    seen = read_image(tmp_path / "a.png")
    assert (seen[0] == [200, 0, 0]).all()
    assert (seen[1, 0] == [40, 0, 0]).all()
    assert (seen[1, 1:] == 0).all()


def test_sixteen_bit_grey_is_scaled(tmp_path):
    wide = np.array([[0, 257, 32768, 65535]], np.uint16)
    Image.fromarray(wide).save(tmp_path / "depth.png")
    assert read_image(tmp_path / "depth.png")[0, :, 0].tolist() == [0, 1, 127, 255]


def test_a_photo_may_be_large(tmp_path):
    Image.new("RGB", (4000, 3000), (1, 2, 3)).save(tmp_path / "photo.jpg")
    assert read_image(tmp_path / "photo.jpg").shape == (3000, 4000, 3)


def test_missing_folder_foreign_and_truncated_files_are_named(tmp_path, picture):
    text = tmp_path / "notes.png"
    text.write_text("no picture")
    broken = tmp_path / "broken.png"
    Image.fromarray(pixels(64, 64)).save(broken)
    broken.write_bytes(broken.read_bytes()[:700])
    empty = tmp_path / "empty.jpg"
    empty.touch()
    for path, words in [
        (tmp_path / "nowhere.png", "does not exist"),
        (tmp_path, "is a folder"),
        (text, "no picture format"),
        (broken, "cannot be decoded"),
        (empty, "no picture format"),
    ]:
        with pytest.raises(CliError, match=words) as caught:
            read_image(path)
        assert str(path) in caught.value.message
        assert caught.value.hint


def test_a_decompression_bomb_is_refused(tmp_path, picture, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20)
    with pytest.raises(CliError, match="decompression bomb"):
        read_image(picture)


def test_camera_options_split_at_the_first_equals_sign():
    images = parse_images(["base_0_rgb=a=b.png", " wrist = c.png "])
    assert {name: str(path) for name, path in images.items()} == {
        "base_0_rgb": "a=b.png",
        "wrist": "c.png",
    }


def test_a_home_folder_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/robot")
    assert str(parse_images(["base=~/a.png"])["base"]) == "/home/robot/a.png"


@pytest.mark.parametrize("entry", ["base", "=a.png", "base=", "", " = "])
def test_a_camera_option_without_name_or_file_is_refused(entry):
    with pytest.raises(ValueError, match="is not NAME=FILE"):
        parse_images([entry])


def test_a_camera_given_twice_is_refused():
    with pytest.raises(ValueError, match="'base' is given twice"):
        parse_images(["base=a.png", "base=b.png"])


@pytest.mark.parametrize(
    ("text", "values"),
    [("0.5", [0.5]), ("-0.5, 1e-3 ,2", [-0.5, 1e-3, 2]), ("1 2\n3", [1, 2, 3]), ("1,2,", [1, 2])],
)
def test_states_are_read(text, values):
    state = parse_state(text)
    assert state.dtype == np.float32
    np.testing.assert_allclose(state, values, rtol=1e-6)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no number"),
        (" , ", "no number"),
        ("1,x", "'x' in the state"),
        ("nan", "not finite"),
        ("1,inf", "not finite"),
        ("1e39", "not finite"),
    ],
)
def test_bad_states_are_refused(text, words):
    with pytest.raises(ValueError, match=words):
        parse_state(text)
