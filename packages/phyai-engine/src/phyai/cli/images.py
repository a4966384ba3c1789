"""Camera pictures from files."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from phyai.cli.errors import CliError

if TYPE_CHECKING:
    from PIL import Image


def read_image(path: Path) -> np.ndarray:
    """Read a photo as the camera saw it.

    Any size and mode that Pillow decodes. The EXIF orientation is applied, transparency is laid
    over black, 16-bit greys are scaled to 8 bits.

    Args:
        path: An image file.

    Returns:
        uint8 array [height, width, 3], RGB.

    Raises:
        CliError: The file is missing, not an image, truncated, or larger than Pillow accepts.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise CliError(f"image {path} {what}", "give --image NAME=FILE with a picture file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                upright = ImageOps.exif_transpose(image)
                return np.asarray(_to_rgb(upright), dtype=np.uint8)
    except UnidentifiedImageError:
        raise CliError(
            f"image {path} is in no picture format that Pillow knows",
            "convert it to PNG or JPEG",
        ) from None
    except Image.DecompressionBombError as error:
        raise CliError(f"image {path}: {error}", "make the picture smaller first") from None
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise CliError(
            f"image {path} cannot be decoded: {error}", "the file is damaged or incomplete"
        ) from None


def _to_rgb(image: "Image.Image") -> "Image.Image":
    from PIL import Image

    if image.mode.startswith("I;16") or image.mode == "I":
        wide = np.asarray(image).astype(np.int64).clip(0, 65535)
        return Image.fromarray((wide // 257).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        black = Image.new("RGBA", rgba.size, (0, 0, 0, 255))
        return Image.alpha_composite(black, rgba).convert("RGB")
    return image.convert("RGB")


def parse_images(entries: list[str]) -> dict[str, Path]:
    """Split the values of ``--image NAME=FILE``.

    Args:
        entries: Values in the order given. The first ``=`` separates; a path may hold more.

    Returns:
        Camera name to file, in the order given.

    Raises:
        ValueError: A value without a name or a file, or a name given twice.
    """
    images: dict[str, Path] = {}
    for entry in entries:
        name, separator, file = entry.partition("=")
        name, file = name.strip(), file.strip()
        if not (separator and name and file):
            raise ValueError(f"{entry!r} is not NAME=FILE, e.g. base_0_rgb=scene.jpg")
        if name in images:
            raise ValueError(f"camera {name!r} is given twice: {images[name]} and {file}")
        images[name] = Path(file).expanduser()
    return images


def parse_state(text: str) -> np.ndarray:
    """Read the value of ``--state``: numbers separated by commas or spaces.

    Args:
        text: e.g. ``"0.1,0.2,-0.3"``.

    Returns:
        float32 array [state_dim], robot units.

    Raises:
        ValueError: No number, a word that is none, or a number that is not finite.
    """
    words = text.replace(",", " ").split()
    if not words:
        raise ValueError("no number in the state; give e.g. 0.1,0.2,-0.3")
    values = []
    for word in words:
        try:
            values.append(float(word))
        except ValueError:
            raise ValueError(f"{word!r} in the state is not a number") from None
    with np.errstate(over="ignore"):
        state = np.asarray(values, dtype=np.float32)
    if not np.isfinite(state).all():
        raise ValueError(f"the state {text!r} holds a value that is not finite in fp32")
    return state
