"""The codec against the bytes of the protocol, its limits, and a seeded flood of hostile frames.

``PHYAI_FUZZ_FRAMES`` is the number of hostile frames, and ``PHYAI_FUZZ_SEED`` draws others.
"""

import math
import os
import resource
import struct
import subprocess
import sys

import msgpack
import numpy as np
import pytest

from phyai.client import CodecError, Dialect, Limits, packb, unpackb
from phyai.client.codec import decode

from .hostile import hostile_frames

FRAMES = int(os.environ.get("PHYAI_FUZZ_FRAMES", "10000"))
SEED = int(os.environ.get("PHYAI_FUZZ_SEED", "7"))
ARRAY = "81a16184c40b5f5f6e6461727261795f5fc3c40464617461c408000000000000803f"
ARRAY += "c4056474797065a33c6634c40573686170659102"
SCALAR = "81a17883c40d5f5f6e7067656e657269635f5fc3c40464617461cb3ff8000000000000"
SCALAR += "c4056474797065a33c6634"


def test_bytes_are_those_of_openpi():
    assert packb({"a": np.arange(2, dtype=np.float32)}).hex() == ARRAY
    assert packb({"x": np.float32(1.5)}).hex() == SCALAR
    assert packb({}) == b"\x80"


def test_arrays_in_fortran_order_and_views_are_written_in_c_order():
    base = np.arange(24, dtype=np.int16).reshape(4, 6)
    for array in (np.asfortranarray(base), base[::2, ::-3], base.T):
        np.testing.assert_array_equal(unpackb(packb(array)), array)


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize(
    "array",
    [
        np.array([[True, False, True]]),
        np.arange(7, dtype="<u8"),
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.linspace(0, 1, 5, dtype=np.float16),
        np.zeros((0, 3)),
        np.array(1.5),
        np.array("reach the red disc"),
        np.array(["\U0010ffff", "\ud7ff\ue000"]),
        np.array([b"ab", b"c"]),
    ],
    ids=lambda array: f"{array.dtype.str}{array.shape}",
)
def test_round_trip_in_every_spelling(dialect, array):
    value, seen = decode(packb({"x": [array]}, dialect))
    assert seen is dialect
    read = value["x"][0]
    assert read.dtype == array.dtype
    assert read.shape == array.shape
    np.testing.assert_array_equal(read, array)
    assert not read.flags.writeable


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize("scalar", [np.float32(1.5), np.uint8(200), np.bool_(True), np.int64(-3)])
def test_scalars_keep_their_type(dialect, scalar):
    read = unpackb(packb({"x": scalar}, dialect))["x"]
    assert type(read) is type(scalar)
    assert read == scalar


def test_plain_values():
    value = {"a": None, "b": [True, -1, 2**63, 0.25], "c": {"d": "π", "e": b"\xff"}}
    assert unpackb(packb(value)) == value
    assert unpackb(packb((1, 2))) == [1, 2]


def openpi(dtype, data=b"\0" * 8, shape=(2,)):
    keys = {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": list(shape)}
    return msgpack.packb({"a": keys})


def other(**changes):
    keys = {"nd": True, "type": "<f4", "kind": b"", "shape": [2], "data": b"\0" * 8} | changes
    return msgpack.packb({"a": {key.encode(): value for key, value in keys.items()}})


REFUSED = {
    "object dtype": (openpi("|O"), "dtype '|O' is not read"),
    "structured dtype": (openpi("f4,f4"), "is not read"),
    "void dtype": (openpi("|V8"), "is not read"),
    "subarray dtype": (openpi("(1000000,)f4"), "is not read"),
    "complex dtype": (openpi("<c8"), "is not read"),
    "date dtype": (openpi("<M8[ns]"), "is not read"),
    "wide string": (openpi("<U999999"), "is not read"),
    "no character": (openpi("<U1", data=b"\xff" * 8), "no characters"),
    "half a character": (openpi(">U1", data=b"\0\0\xd8\0" * 2), "no characters"),
    "no character alone": (other(nd=False, type="<U1", data=b"\0\0\x11\0"), "no characters"),
    "no dtype": (openpi(None), "is not read"),
    "structured list dtype": (openpi([["a", "<f4"]]), "is not read"),
    "pickled object": (other(kind=b"O", data=b"cos\nsystem\n(S'true'\ntR."), "can run code"),
    "structured array": (other(kind=b"V"), "can run code"),
    "complex number": (msgpack.packb({b"complex": True, b"data": "1j"}), "complex numbers"),
    "too little data": (openpi("<f4", shape=(3,)), "has 12 bytes, but the frame brings 8"),
    "huge shape": (openpi("<f4", shape=(2**31,)), "not allowed"),
    "overflowing shape": (openpi("<f4", shape=(2**30, 2**30, 2**30)), "the frame brings 8"),
    "negative side": (openpi("<f4", shape=(-2,)), "not allowed"),
    "fractional side": (openpi("<f4", shape=(2.0,)), "not allowed"),
    "boolean side": (openpi("<f4", shape=(True,)), "not allowed"),
    "many axes": (openpi("<f4", shape=(1,) * 7 + (2, 1)), "at most 8 lengths"),
    "text as data": (openpi("<f4", data="\0" * 8), "expected bytes"),
    "binary key": (msgpack.packb({b"x": 1}), "keys are strings"),
    "number key": (msgpack.packb({1: 1}), "not allowed for map key"),
    "extension": (msgpack.packb({"x": msgpack.ExtType(5, b"abc")}), "no extension types"),
    "timestamp": (msgpack.packb(msgpack.Timestamp(1)), "no extension types"),
    "empty frame": (b"", "ends after 0 bytes"),
    "unused type": (b"\xc1", "0xc1"),
    "truncated": (openpi("<f4")[:-1], "ends"),
    "trailing": (b"\x80\x80", "1 bytes follow"),
    "lie about length": (b"\xdd\xff\xff\xff\xff", "container of 4294967295"),
    "lie about bytes": (b"\xc6\xff\xff\xff\xff", "runs to byte"),
    "no text": (b"\xa2\xff\xfe", "can not be read"),
    "deep arrays": (b"\x91" * 100_000 + b"\x00", "deeper than 16"),
    "deep maps": (b"\x81\xa1x" * 100_000 + b"\x00", "deeper than 16"),
    "many values": (msgpack.packb([0] * 30_000), "at most 20000"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    frame, reason = REFUSED[name]
    with pytest.raises(CodecError) as refused:
        unpackb(frame)
    assert reason in str(refused.value)


def test_frames_over_the_limit_are_not_looked_at():
    with pytest.raises(CodecError, match="at most 10 are read"):
        unpackb(b"\xc6" + struct.pack(">I", 20) + b"\0" * 20, Limits(frame_bytes=10))


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        1j,
        np.array([1j]),
        np.array([object()]),
        np.zeros(2, dtype="f4,f4"),
        np.datetime64("2026-01-01"),
        2**64,
    ],
    ids=[
        "object",
        "set",
        "complex",
        "complex array",
        "object array",
        "structured array",
        "datetime",
        "huge integer",
    ],
)
def test_not_written(value):
    for dialect in Dialect:
        with pytest.raises(CodecError, match="written"):
            packb({"x": value}, dialect)


def test_cycles_are_an_error():
    cycle: list = []
    cycle.append(cycle)
    with pytest.raises(CodecError, match="can not be written"):
        packb(cycle)


def test_hostile_frames_raise_only_our_error_and_take_no_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for number, frame in enumerate(hostile_frames(SEED, FRAMES), 1):
        try:
            unpackb(frame)
        except CodecError:
            refused += 1
        except Exception as error:
            repro = f"PHYAI_FUZZ_SEED={SEED} PHYAI_FUZZ_FRAMES={number} pytest {__file__}"
            error.add_note(f"repro: {repro}\nunpackb(bytes.fromhex({frame[:200].hex()!r}))")
            raise
    assert refused > 0.5 * FRAMES
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 100 * 1024


def test_a_frame_of_300_mib_is_refused_by_its_length():
    frame = memoryview(bytearray(300 * 2**20))
    with pytest.raises(CodecError, match="at most 67108864 are read"):
        unpackb(frame)


def test_memory_follows_the_frame_and_not_what_it_claims():
    limit = Limits(values=1000)
    frame = msgpack.packb([[0] * 15] * 2000)
    with pytest.raises(CodecError, match="at most 1000"):
        unpackb(frame, limit)
    assert math.isclose(unpackb(packb([1.0]), limit)[0], 1.0)


def test_the_client_imports_no_torch_and_nothing_that_unpickles():
    program = (
        "import sys; before = set(sys.modules); import phyai.client\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "bad = new & {'torch', 'phyai_quant', 'piper_kernels', 'dill', 'cloudpickle', 'PIL'}\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
