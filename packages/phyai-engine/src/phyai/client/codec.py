"""NumPy arrays in msgpack, as openpi and msgpack-numpy write them, without what runs code.

Three spellings of an array are read, and a reply is written in the one that the request used:

=================  ==================================================================
`Dialect.OPENPI`   a map with the binary keys ``__ndarray__, data, dtype, shape``
`Dialect.STRINGS`  the same with string keys, from languages without a binary type
`Dialect.NUMPY`    msgpack-numpy's map with the binary keys ``nd, type, kind, shape, data``
=================  ==================================================================

Arrays hold booleans, integers, floats or fixed-width strings. Object and structured arrays,
complex numbers, dates and extension types are refused in both directions, before any byte of
them is looked at.
"""

import enum
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgpack
import numpy as np

from phyai.client.errors import CodecError
from phyai.client.scan import Limits, scan

_DTYPE = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f[248]|[SU][1-9][0-9]{0,4})")
_KINDS = frozenset("biufSU")
_DEFAULT_LIMITS = Limits()
_MAX_SIDE = 2**31
_LAST_CHARACTER = 0x10FFFF
# U+D800 to U+DFFF, without their lower 11 bits.
_SURROGATES = 0xD800 >> 11


class Dialect(enum.StrEnum):
    """How arrays are spelled."""

    OPENPI = "openpi"
    STRINGS = "strings"
    NUMPY = "msgpack-numpy"


def packb(value: Any, dialect: Dialect = Dialect.OPENPI) -> bytes:
    """Encode `value`.

    Args:
        value: Maps with string keys, lists, tuples, strings, bytes, numbers, booleans, None, and
            NumPy arrays and scalars of the kinds b, i, u, f, S and U.
        dialect: Spelling of the arrays.

    Returns:
        One msgpack value; for `Dialect.OPENPI` the same bytes as openpi's own client writes.

    Raises:
        CodecError: A value of another type, an integer beyond 64 bits, or nesting beyond what
            msgpack writes.
    """
    try:
        return bytes(msgpack.Packer(default=_ENCODERS[dialect]).pack(value))
    except CodecError:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CodecError(f"the value can not be written: {error}") from None


def unpackb(frame: bytes | memoryview, limits: Limits = _DEFAULT_LIMITS) -> Any:
    """Decode one frame; see `decode`."""
    return decode(frame, limits)[0]


def decode(
    frame: bytes | memoryview, limits: Limits = _DEFAULT_LIMITS
) -> tuple[Any, Dialect | None]:
    """Decode one frame.

    Arrays are read-only views of the frame's bytes.

    Args:
        frame: Exactly one msgpack value.
        limits: What it may hold.

    Returns:
        The value, and the spelling of its first array or NumPy scalar; None when it has none.

    Raises:
        CodecError: Anything that is not such a value or goes beyond the limits.
    """
    scan(frame, limits)
    reader = _Reader(limits)
    try:
        value = msgpack.unpackb(frame, object_hook=reader.hook, raw=False, strict_map_key=True)
    except CodecError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise CodecError(f"the frame can not be read: {error}") from None
    return value, reader.dialect


class _Reader:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.dialect: Dialect | None = None

    def hook(self, mapping: dict[Any, Any]) -> Any:
        if b"__ndarray__" in mapping:
            return self._array(mapping, Dialect.OPENPI, b"dtype", b"shape", b"data")
        if b"__npgeneric__" in mapping:
            return self._scalar(mapping, Dialect.OPENPI, b"dtype", b"data")
        if "__ndarray__" in mapping:
            return self._array(mapping, Dialect.STRINGS, "dtype", "shape", "data")
        if "__npgeneric__" in mapping:
            return self._scalar(mapping, Dialect.STRINGS, "dtype", "data")
        if b"nd" in mapping:
            return self._msgpack_numpy(mapping)
        if b"complex" in mapping:
            raise CodecError("complex numbers are not read")
        for key in mapping:
            if not isinstance(key, str):
                raise CodecError(f"map key {key!r} is {type(key).__name__}; keys are strings")
        return mapping

    def _msgpack_numpy(self, mapping: dict[Any, Any]) -> Any:
        kind = mapping.get(b"kind", b"")
        if kind not in (b"", ""):
            raise CodecError(
                f"an array of kind {kind!r} is not read: object and structured arrays can run "
                "code when they are decoded. Send plain numeric arrays"
            )
        if mapping[b"nd"] is True:
            return self._array(mapping, Dialect.NUMPY, b"type", b"shape", b"data")
        dtype, data = _dtype(mapping.get(b"type")), mapping.get(b"data")
        if not isinstance(data, bytes) or len(data) != dtype.itemsize:
            raise CodecError(f"a NumPy scalar of {dtype} needs {dtype.itemsize} bytes of data")
        _check_text(data, dtype)
        self._note(Dialect.NUMPY)
        return np.frombuffer(data, dtype)[0]

    def _array(self, mapping: dict[Any, Any], dialect: Dialect, *keys: Any) -> np.ndarray:
        dtype_key, shape_key, data_key = keys
        dtype = _dtype(mapping.get(dtype_key))
        shape = _shape(mapping.get(shape_key), self.limits.dimensions)
        data = mapping.get(data_key)
        if not isinstance(data, bytes):
            raise CodecError(f"the data of an array is {type(data).__name__}, expected bytes")
        count = math.prod(shape)
        if count * dtype.itemsize != len(data):
            raise CodecError(
                f"an array of shape {shape} and dtype {dtype.str} has "
                f"{count * dtype.itemsize} bytes, but the frame brings {len(data)}"
            )
        self._note(dialect)
        _check_text(data, dtype)
        flat = np.frombuffer(data, dtype) if data else np.empty(0, dtype)
        array = flat.reshape(shape)
        array.flags.writeable = False
        return array

    def _scalar(self, mapping: dict[Any, Any], dialect: Dialect, *keys: Any) -> Any:
        dtype_key, data_key = keys
        dtype, data = _dtype(mapping.get(dtype_key)), mapping.get(data_key)
        if not isinstance(data, bool | int | float | str | bytes):
            raise CodecError(f"the data of a NumPy scalar is {type(data).__name__}")
        self._note(dialect)
        with np.errstate(over="ignore"):
            return dtype.type(data)

    def _note(self, dialect: Dialect) -> None:
        if self.dialect is None:
            self.dialect = dialect


def _dtype(name: Any) -> np.dtype[Any]:
    if isinstance(name, bytes):
        name = name.decode("latin-1")
    if not isinstance(name, str) or not _DTYPE.fullmatch(name):
        raise CodecError(
            f"dtype {str(name)[:40]!r} is not read; allowed are booleans, integers, floats and "
            "strings of fixed width, such as '|u1' or '<f4'"
        )
    return np.dtype(name)


def _check_text(data: bytes, dtype: np.dtype[Any]) -> None:
    """Refuse text with a number that is no character: reading it as a string would fail."""
    if dtype.kind != "U":
        return
    points = np.frombuffer(data, np.dtype(np.uint32).newbyteorder(dtype.byteorder))
    if ((points > _LAST_CHARACTER) | (points >> 11 == _SURROGATES)).any():
        raise CodecError(f"an array of dtype {dtype.str} holds numbers that are no characters")


def _shape(shape: Any, dimensions: int) -> tuple[int, ...]:
    sides = tuple(shape) if isinstance(shape, list | tuple) else None
    if sides is None or len(sides) > dimensions:
        raise CodecError(f"the shape of an array is no list of at most {dimensions} lengths")
    for side in sides:
        if type(side) is not int or not 0 <= side < _MAX_SIDE:
            raise CodecError(f"length {str(side)[:40]} in the shape of an array is not allowed")
    return sides


def _checked(value: Any) -> np.ndarray | np.generic:
    if not isinstance(value, np.ndarray | np.generic):
        raise CodecError(
            f"{type(value).__name__} can not be written; allowed: maps, lists, strings, bytes, "
            "numbers, booleans, None and NumPy arrays"
        )
    if value.dtype.kind not in _KINDS:
        raise CodecError(f"dtype {value.dtype} can not be written; send plain numbers or strings")
    return value


def _encode_marked(convert: Callable[[str], Any], value: Any) -> Mapping[Any, Any]:
    array = _checked(value)
    if isinstance(array, np.ndarray):
        return {
            convert("__ndarray__"): True,
            convert("data"): array.tobytes(),
            convert("dtype"): array.dtype.str,
            convert("shape"): array.shape,
        }
    return {
        convert("__npgeneric__"): True,
        convert("data"): array.item(),
        convert("dtype"): array.dtype.str,
    }


def _encode_numpy(value: Any) -> Mapping[bytes, Any]:
    array = _checked(value)
    head: dict[bytes, Any] = {b"nd": isinstance(array, np.ndarray), b"type": array.dtype.str}
    if isinstance(array, np.ndarray):
        head |= {b"kind": b"", b"shape": array.shape}
    return head | {b"data": array.tobytes()}


_ENCODERS: Mapping[Dialect, Callable[[Any], Any]] = {
    Dialect.OPENPI: functools.partial(_encode_marked, str.encode),
    Dialect.STRINGS: functools.partial(_encode_marked, str),
    Dialect.NUMPY: _encode_numpy,
}
