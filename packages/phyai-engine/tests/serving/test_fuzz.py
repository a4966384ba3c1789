"""Random pictures, options and requests: what the server reads, or an error about the request."""

import io
from dataclasses import fields

import numpy as np
import pytest
from PIL import Image

from phyai.client import CodecError, Dialect, packb, unpackb
from phyai.processing import Observation, ProcessingError
from phyai.serving import built_in_adapter
from phyai.serving.adapters import ADAPTERS
from phyai.serving.images import as_image
from phyai.serving.jobs import RequestError
from phyai.serving.options import RequestOptions, parse_options

from .conftest import FakeEngine

VALUES = [
    None, True, False, 0, -1, 1, 7, 100, 101, 2**63, 1.5, float("nan"), float("inf"), 1e300, "",
    "linear", "exp", "x" * 300, b"", b"\xff\xd8\xff", [], [1, 2], [[0.5, 0.5]], {}, {"a": 1},
    np.float32(2), np.int64(3), np.zeros((3, 2), np.float32), np.full((3, 2), np.nan), np.zeros(3),
    np.zeros((0, 2)), np.array("go"), np.array([b"go"]), np.zeros((8, 8, 3), np.uint8),
    np.zeros((1, 8, 8, 3), np.uint8), np.zeros((8, 8)), np.zeros((8, 8, 3), np.int32),
    np.zeros((2, 8, 8, 3), np.uint8), np.array(5),
]  # fmt: skip
OPTIONS = [field.name for field in fields(RequestOptions)]
RTC = ["executed", "delay", "horizon", "schedule", "max_guidance_weight", "prev"]
RTC += ["inference_delay", "execution_horizon", "unknown"]


def encoded(draw):
    """A JPEG or PNG file of random pixels, in one of the modes that such files have."""
    mode = draw.choice(["RGB", "L", "RGBA", "P", "1", "CMYK", "LA", "I;16"])
    kind = draw.choice(["JPEG", "PNG"])
    side = [draw.choice([1, 3, 8, 33]) for _ in range(2)]
    noise = np.random.default_rng(draw.randrange(2**32)).integers(0, 256, (*side, 3), np.uint8)
    picture = Image.fromarray(noise)
    if (kind, mode) not in (("JPEG", "P"), ("JPEG", "I;16"), ("PNG", "CMYK")):
        picture = picture.convert("L").convert("I;16") if mode == "I;16" else picture.convert(mode)
    if kind == "JPEG" and picture.mode not in ("RGB", "L", "CMYK"):
        picture = picture.convert("RGB")
    file = io.BytesIO()
    picture.save(file, kind)
    return bytearray(file.getvalue()), side


def damaged(draw, data):
    """Cuts, flips or repeats bytes of a file, not those that say what it is."""
    for _ in range(draw.randrange(1, 4)):
        place = draw.randrange(8, len(data)) if len(data) > 8 else 0
        action = draw.choice(["flip", "flip", "cut", "insert", "length"])
        if action == "flip" and len(data) > place:
            data[place] = draw.randrange(256)
        elif action == "cut":
            del data[place:]
        elif action == "insert":
            data[place:place] = draw.randbytes(draw.randrange(1, 9))
        else:
            data[place : place + 4] = draw.choice(
                [b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", bytes(4)]
            )
    return data


def test_pictures(fuzz):
    def check(draw):
        data, side = encoded(draw)
        whole = draw.random() < 0.3
        data = bytes(data if whole else damaged(draw, data))
        value = np.frombuffer(data, np.uint8) if draw.random() < 0.3 else data
        try:
            picture = as_image("front", value)
        except RequestError as error:
            message = str(error)
        else:
            assert picture.dtype == np.uint8
            assert picture.shape[2:] == (3,)
            assert not whole or picture.shape == (*side, 3)
            return True
        assert message.startswith("image 'front'")
        assert not whole, message
        return False

    fuzz("pictures", check, 300, (0.3, 0.95))


def test_options(fuzz):
    def check(draw):
        given = {draw.choice([*OPTIONS, "unknown"]): draw.choice(VALUES)
                 for _ in range(draw.randrange(3))}  # fmt: skip
        if draw.random() < 0.5:
            given["rtc"] = {draw.choice(RTC): draw.choice(VALUES)
                            for _ in range(draw.randrange(3))}  # fmt: skip
        try:
            options = parse_options(draw.choice(VALUES) if draw.random() < 0.1 else given)
        except RequestError as error:
            message = str(error)
        else:
            assert options.num_steps is None or 1 <= options.num_steps <= 100
            assert options.noise is None or np.isfinite(options.noise).all()
            assert options.session is None or 1 <= len(options.session) <= 128
            return True
        assert len(message) > 20
        return False

    fuzz("options", check, 300, (0.1, 0.9))


@pytest.fixture(scope="module", params=ADAPTERS[1:])
def adapter(request):
    return built_in_adapter(request.param, FakeEngine().describe())


def test_requests(adapter, fuzz):
    def check(draw):
        asked = adapter.example((8, 8), 8)
        for _ in range(draw.randrange(3)):
            key = draw.choice([*asked, "hand", "spare", "images", "state", "task", "unknown"])
            if draw.random() < 0.2:
                asked.pop(key, None)
            else:
                asked[key] = draw.choice(VALUES)
        try:
            seen = adapter.observation(asked)
        except (RequestError, ProcessingError) as error:
            message = str(error)
        else:
            assert isinstance(seen, Observation)
            assert isinstance(seen.task, str)
            assert all(isinstance(image, np.ndarray) for image in seen.images.values())
            return True
        assert len(message) > 20
        return False

    fuzz("requests", check, 300, (0.1, 0.95))


def test_values_survive_the_wire(fuzz):
    """What is written is read again, in every spelling, or is refused when it is written."""

    def value(draw, depth=0):
        kind = draw.choice(["plain", "plain", "list", "map"]) if depth < 3 else "plain"
        if kind == "list":
            return [value(draw, depth + 1) for _ in range(draw.randrange(4))]
        if kind == "map":
            return {draw.choice(["a", "é", "", "data"]): value(draw, depth + 1)
                    for _ in range(draw.randrange(4))}  # fmt: skip
        return draw.choice([*VALUES, 1j, object(), np.array([1j]), np.zeros(2, "<M8[s]"), 2**64])

    def same(found, given):
        if isinstance(given, dict):
            return found.keys() == given.keys() and all(same(found[k], given[k]) for k in given)
        if isinstance(given, list):
            return len(found) == len(given) and all(map(same, found, given))
        kept = np.asarray(found).dtype == np.asarray(given).dtype
        return kept and np.array_equal(found, given, equal_nan=np.asarray(given).dtype.kind == "f")

    def check(draw):
        given, dialect = {"x": value(draw)}, draw.choice(list(Dialect))
        try:
            frame = packb(given, dialect)
        except CodecError as error:
            message = str(error)
        else:
            assert same(unpackb(frame), given), given
            return True
        assert "can not be written" in message
        return False

    fuzz("wire", check, 300, (0.3, 0.99))
