"""Pictures in requests: JPEG and PNG bytes to arrays, within limits."""

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from phyai.serving.jobs import RequestError

MAX_PIXELS = 4096 * 4096
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")
_FORMATS = ("JPEG", "PNG")


def as_image(name: str, value: Any) -> np.ndarray:
    """Return the picture of one camera as an array.

    Args:
        name: Key of the picture, for errors.
        value: uint8 or float array of three axes, or the bytes of a JPEG or PNG file (also as a
            uint8 array of one axis). A leading axis of length 1 is dropped.

    Returns:
        Arrays as they came; files as uint8 [H, W, 3].

    Raises:
        RequestError: Another type, a file that can not be read, or more than 4096 × 4096 pixels.
    """
    data = _file_bytes(value)
    if data is not None:
        return _decode(name, data)
    if not isinstance(value, np.ndarray):
        raise RequestError(
            f"image {name!r} is {type(value).__name__}, expected an array or JPEG or PNG bytes"
        )
    array = value[0] if value.ndim == 4 and value.shape[0] == 1 else value
    if array.ndim != 3 or not (array.dtype == np.uint8 or array.dtype.kind == "f"):
        raise RequestError(
            f"image {name!r} is {value.dtype} {value.shape}, expected uint8 or float [H, W, 3] or "
            "[3, H, W]"
        )
    if array.size > 3 * MAX_PIXELS:
        raise RequestError(f"image {name!r} has {array.shape}: more than {MAX_PIXELS} pixels")
    return array


def is_file(value: Any) -> bool:
    """Return whether a value is the bytes of a JPEG or PNG file, also as a uint8 array [N]."""
    data = _file_bytes(value)
    return data is not None and data.startswith(_MAGIC)


def _file_bytes(value: Any) -> bytes | None:
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype == np.uint8:
        return value.tobytes()
    return value if isinstance(value, bytes) else None


def _decode(name: str, data: bytes) -> np.ndarray:
    if not data.startswith(_MAGIC):
        raise RequestError(f"image {name!r} is bytes but neither JPEG nor PNG")
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as picture:
            width, height = picture.size
            if width * height > MAX_PIXELS:
                raise RequestError(
                    f"image {name!r} has {width} x {height} pixels; at most {MAX_PIXELS} are read"
                )
            return np.asarray(picture.convert("RGB"))
    except (
        OSError,
        UnidentifiedImageError,
        Image.DecompressionBombError,
        SyntaxError,
        ValueError,
        EOFError,
    ) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"image {name!r} can not be decoded: {error}") from None


def pictures_of(request: Mapping[str, Any], keys: frozenset[str]) -> dict[str, Any]:
    """Return the pictures of a request by name: those under `keys` and those below ``images``."""
    found = {key: request[key] for key in request if key in keys}
    nested = request.get("images")
    return found | (dict(nested) if isinstance(nested, Mapping) else {})
