"""Robots, on the network: what a server answers, and what it refuses to read."""

import asyncio
import contextlib
import io
import pickle
import re
import struct
import threading
import urllib.request
import zlib
from pathlib import Path

import msgpack
import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

import phyai.client
import phyai.serving
from phyai.client import CodecError, PolicyClient, ServerError, packb, unpackb
from phyai.engine import Engine
from phyai.serving import PolicyConfig, ServeConfig, ServerConfig
from phyai.serving.launch import running_server


class Served:
    """A server of the tiny policy, in a thread with its own event loop."""

    def __init__(self, folder, **settings):
        policy = PolicyConfig(folder, device="cpu")
        self._config = ServeConfig(policy, ServerConfig(port=0, **settings))
        self._started, self._error = threading.Event(), None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    async def _main(self):
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with running_server(self._config) as server:
                self.port = server.port
                self._started.set()
                await self._stop.wait()
        except Exception as error:
            self._error = error
            self._started.set()

    def __enter__(self):
        self._thread.start()
        assert self._started.wait(120)
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *exception):
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        assert not self._thread.is_alive()

    def get(self, page):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{page}", timeout=60) as answer:
            return answer.status

    def socket(self):
        return connect(f"ws://127.0.0.1:{self.port}", compression=None)

    def request(self, client, seen):
        metadata = client.metadata
        images = dict(zip(metadata["image_keys"], seen.images.values(), strict=False))
        return images | {metadata["state_keys"][0]: seen.state, "prompt": seen.task}


def test_case_86_others_are_answered_while_the_policy_computes(tiny_pi05, monkeypatch, observation):
    """While one request computes, others connect, ping and see the health page.

    Handled in phyai.serving.batching, phyai.serving.server.
    """
    computing, go_on, replies = threading.Event(), threading.Event(), []
    compute = Engine.infer_batch

    def slow(self, observations, **options):
        if armed:
            computing.set()
            assert go_on.wait(120)
        return compute(self, observations, **options)

    armed = []
    monkeypatch.setattr(Engine, "infer_batch", slow)
    with Served(tiny_pi05, request_timeout_s=120.0) as server:

        def ask():
            with PolicyClient(port=server.port, timeout_s=120.0) as client:
                replies.append(client.infer(server.request(client, observation)))

        armed.append(True)
        asking = threading.Thread(target=ask)
        asking.start()
        try:
            assert computing.wait(60)
            for _ in range(3):
                assert server.get("/healthz") == 200
                with server.socket() as socket:
                    assert unpackb(socket.recv(60))["image_keys"]
                    assert socket.ping().wait(60)
            assert replies == []
        finally:
            go_on.set()
            asking.join(60)
        assert np.isfinite(replies[0]["actions"]).all()


class Evil:
    """What runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_case_88_a_pickled_frame_is_never_run(tmp_path):
    """No wire path imports what unpickles, and a pickle sent as a frame is not run.

    Handled in phyai.client.codec.
    """
    path = tmp_path / "ran"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        payload = pickle.dumps(Evil(path), protocol)
        for frame in (payload, msgpack.packb({"image": payload})):
            with contextlib.suppress(CodecError):
                assert unpackb(frame) == {"image": payload}
    assert not path.exists()
    unpickling = re.compile(r"^\s*(import|from) (pickle|dill|cloudpickle|marshal|shelve|joblib)\b")
    for package in (phyai.client, phyai.serving):
        for file in Path(package.__file__).parent.rglob("*.py"):
            lines = file.read_text(encoding="utf-8").splitlines()
            assert not [line for line in lines if unpickling.match(line)], file


def test_case_89_arrays_of_objects_are_refused(tmp_path):
    """An array whose kind or dtype says object is refused, in both spellings.

    Handled in phyai.client.codec.
    """
    data = pickle.dumps(Evil(tmp_path / "ran"))
    numpy_style = {"nd": True, "type": "|O", "kind": b"O", "shape": [1], "data": data}
    harmless = numpy_style | {"type": "<f8", "data": bytes(8)}
    openpi_style = {b"__ndarray__": True, b"data": data, b"dtype": "|O", b"shape": [1]}
    for fields in (
        {key.encode(): value for key, value in numpy_style.items()},
        {key.encode(): value for key, value in harmless.items()},
        openpi_style,
        {key.decode(): value for key, value in openpi_style.items()},
    ):
        with pytest.raises(CodecError):
            unpackb(msgpack.packb({"image": fields}))
    assert not (tmp_path / "ran").exists()
    with pytest.raises(CodecError):
        packb({"x": np.array([object()])})


def png_bomb(side):
    """A PNG of side x side white pixels in a few kilobytes."""

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    packer, rows = zlib.compressobj(9), io.BytesIO()
    for _ in range(64):
        rows.write(packer.compress(bytes((side // 8 + 1) * (side // 64))))
    rows.write(packer.flush())
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", rows.getvalue()), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_case_91_oversized_requests_are_refused_before_they_are_read(tiny_pi05, observation):
    """A frame over the limit closes the connection, and a picture that unpacks to far more than
    it weighs is refused by its declared size; the server goes on.

    Handled in phyai.serving.server, phyai.serving.images, phyai.client.codec.
    """
    with Served(tiny_pi05, max_frame_bytes=200_000) as server:
        with server.socket() as socket:
            socket.recv(60)
            socket.send(bytes(200_001))
            with pytest.raises(ConnectionClosed) as closed:
                socket.recv(60)
            assert closed.value.rcvd.code == 1009  # message too big
        bomb = png_bomb(8192)
        assert len(bomb) < 100_000
        with PolicyClient(port=server.port) as client:
            good = server.request(client, observation)
            bad = good | {client.metadata["image_keys"][0]: bomb}
            with pytest.raises(ServerError, match="8192 x 8192 pixels; at most 16777216 are read"):
                client.infer(bad)
        with PolicyClient(port=server.port) as client:
            assert np.isfinite(client.infer(good)["actions"]).all()
    lie = b"\xc6" + struct.pack(">I", 2**30)  # a gibibyte is said to follow
    with pytest.raises(CodecError, match="runs to byte"):
        unpackb(lie)


def test_case_92_what_is_read_is_listed_not_what_is_refused(sources):
    """The codec reads a short list of number types; nothing is filtered by its name.

    Handled in phyai.client.codec.
    """

    def array(dtype):
        keys = {b"__ndarray__": True, b"data": bytes(16), b"dtype": dtype, b"shape": [1]}
        return msgpack.packb({"a": keys})

    names = ["builtins.getattr", "__import__", "os.system", "O8", "f4,f4", "V16", "<c16", "<M8[s]"]
    for name in names:
        with pytest.raises(CodecError, match="is not read"):
            unpackb(array(name))
    unpickler = re.compile(r"\bUnpickler\b|\bfind_class\b|\ballow_pickle\s*=\s*True")
    assert not [file for file in sources if unpickler.search(file.read_text(encoding="utf-8"))]
