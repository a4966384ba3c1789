"""Frames that a careless decoder would choke on."""

import random
import struct
from collections.abc import Iterator

import msgpack

DTYPES = ["|O", "f4,f4", "|V8", "<c8", "<M8[ns]", "(999,)f4", "<U99999", "<U1", "<f4", "|u1", "", 3]
NAMES = [(b"__ndarray__", b"dtype"), ("__ndarray__", "dtype"), (b"nd", b"type")]
SIDES = [0, 1, 2, 3, -1, 2**31 - 1, 2**31, 2**62, 2.5, True, None, "2"]


def hostile_frames(seed: int, count: int) -> Iterator[bytes]:
    """Yield frames: wrong arrays, cut and flipped good ones, deep nesting, lies about lengths."""
    draw = random.Random(seed)
    kinds = [array, cut, flipped, nested, lying, noise, scalar]
    for _ in range(count):
        yield draw.choice(kinds)(draw)


def array(draw: random.Random) -> bytes:
    marker, dtype = draw.choice(NAMES)
    text = isinstance(marker, str)
    key = (lambda name: name) if text else str.encode
    fields = {
        marker: draw.choice([True, False, 1, None]),
        dtype: draw.choice(DTYPES),
        key("shape"): [draw.choice(SIDES) for _ in range(draw.randrange(12))],
        key("data"): draw.choice([b"", draw.randbytes(draw.randrange(64)), "text", 5, [1]]),
        key("kind"): draw.choice([b"", b"O", b"V", 3]),
    }
    for name in list(fields):
        if draw.random() < 0.1:
            del fields[name]
    return msgpack.packb({"image": fields})


def scalar(draw: random.Random) -> bytes:
    data = draw.choice([1, -1, 2**63, 1e300, float("nan"), "x", b"x", None, [1], {}])
    marker = draw.choice([b"__npgeneric__", "__npgeneric__"])
    key = str.encode if isinstance(marker, bytes) else str
    return msgpack.packb(
        {"x": {marker: True, key("dtype"): draw.choice(DTYPES), key("data"): data}}
    )


def good(draw: random.Random) -> bytes:
    size = draw.randrange(1, 40)
    image = {
        b"__ndarray__": True,
        b"data": draw.randbytes(3 * size),
        b"dtype": "|u1",
        b"shape": [size, 3],
    }
    return msgpack.packb({"image": image, "prompt": "x" * size, "state": [0.5] * size})


def cut(draw: random.Random) -> bytes:
    frame = good(draw)
    return frame[: draw.randrange(len(frame))] + draw.randbytes(draw.randrange(3))


def flipped(draw: random.Random) -> bytes:
    frame = bytearray(good(draw))
    for _ in range(draw.randrange(1, 6)):
        frame[draw.randrange(len(frame))] = draw.randrange(256)
    return bytes(frame)


def nested(draw: random.Random) -> bytes:
    opening = draw.choice([b"\x91", b"\x81\xa1x", b"\xdc\x00\x01", b"\x81\x91"])
    return opening * draw.randrange(1, 3000) + draw.choice([b"\xc0", b""])


def lying(draw: random.Random) -> bytes:
    kind = draw.choice([0xC6, 0xDB, 0xDD, 0xDF, 0xC9])
    length = draw.choice([2**32 - 1, 2**31, 300 * 2**20, 70_000])
    return bytes([kind]) + struct.pack(">I", length) + draw.randbytes(draw.randrange(200))


def noise(draw: random.Random) -> bytes:
    return draw.randbytes(draw.randrange(200))
