"""A walk over the headers of a msgpack frame, before anything is built from it.

Nothing is allocated per value and no recursion happens, so that a hostile frame costs time in
proportion to the number of its headers, which is limited.
"""

import struct
from dataclasses import dataclass
from typing import NoReturn

from phyai.client.errors import CodecError

# Fixed-size values: type byte to payload bytes. Strings and binaries: type byte to length format.
_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
_FIXED |= {0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_SIZED = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I", 0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
_ARRAYS = {0xDC: ">H", 0xDD: ">I"}
_MAPS = {0xDE: ">H", 0xDF: ">I"}


@dataclass(frozen=True)
class Limits:
    """What one frame may hold.

    Attributes:
        frame_bytes: Length of the frame.
        values: Values of all kinds, map keys included.
        depth: Nesting of maps and arrays; an array of numbers counts as a map of depth two.
        dimensions: Axes of an array.
    """

    frame_bytes: int = 64 * 2**20
    values: int = 20_000
    depth: int = 16
    dimensions: int = 8


def scan(frame: bytes | memoryview, limits: Limits) -> None:
    """Check that `frame` is exactly one msgpack value within the limits.

    Args:
        frame: The encoded value.
        limits: What it may hold.

    Raises:
        CodecError: Truncated or trailing bytes, an extension type, or more than the limits allow.
    """
    if len(frame) > limits.frame_bytes:
        raise CodecError(
            f"the frame has {len(frame)} bytes; at most {limits.frame_bytes} are read. "
            "Send smaller images or raise the limit"
        )
    _Walk(memoryview(frame), limits).run()


class _Walk:
    def __init__(self, frame: memoryview, limits: Limits) -> None:
        self.frame, self.limits = frame, limits
        self.at = 0
        self.open: list[int] = []  # values that are still missing, by level
        self.values = 0

    def run(self) -> None:
        while True:
            self._value()
            while self.open and self.open[-1] == 0:
                self.open.pop()
            if not self.open:
                break
            self.open[-1] -= 1
        if self.at != len(self.frame):
            raise CodecError(f"{len(self.frame) - self.at} bytes follow the value of the frame")

    def _value(self) -> None:
        self.values += 1
        if self.values > self.limits.values:
            self._too_many(self.limits.values + 1)
        kind = self._take(1)[0]
        if kind <= 0x7F or kind >= 0xE0:
            return
        if kind <= 0x8F:
            self._enter(2 * (kind & 0x0F))
        elif kind <= 0x9F:
            self._enter(kind & 0x0F)
        elif kind <= 0xBF:
            self._take(kind & 0x1F)
        elif kind in _FIXED:
            self._take(_FIXED[kind])
        elif kind in _SIZED:
            self._take(self._length(_SIZED[kind]))
        elif kind in _ARRAYS:
            self._enter(self._length(_ARRAYS[kind]))
        elif kind in _MAPS:
            self._enter(2 * self._length(_MAPS[kind]))
        else:
            raise CodecError(f"msgpack type 0x{kind:02x} is not read; allowed: no extension types")

    def _enter(self, count: int) -> None:
        # Each value takes a byte at least: a length that the rest can not hold is a lie.
        if count > len(self.frame) - self.at:
            raise CodecError(f"the frame ends inside a container of {count} values")
        if self.values + count > self.limits.values:
            self._too_many(self.values + count)
        if len(self.open) >= self.limits.depth:
            raise CodecError(f"the frame is nested deeper than {self.limits.depth} levels")
        self.open.append(count)

    def _length(self, layout: str) -> int:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))[0]

    def _take(self, count: int) -> memoryview:
        end = self.at + count
        if end > len(self.frame):
            raise CodecError(
                f"the frame ends after {len(self.frame)} bytes but a value runs to byte {end}"
            )
        part = self.frame[self.at : end]
        self.at = end
        return part

    def _too_many(self, seen: int) -> NoReturn:
        raise CodecError(
            f"the frame holds {seen} values or more; at most {self.limits.values} are read. "
            "Send numbers as arrays, not as lists"
        )
