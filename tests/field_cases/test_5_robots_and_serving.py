"""Robots: policies, processors and serving."""

import asyncio
import contextlib
import io
import json
import pickle
import re
import struct
import sys
import threading
import urllib.request
import zlib
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

import phyai.client
import phyai.serving
from phyai.checkpoints import CheckpointReader
from phyai.client import CodecError, PolicyClient, ServerError, packb, unpackb
from phyai.engine import Engine, EngineArgs
from phyai.engine_config import DeviceConfig, EngineConfig
from phyai.models.pi05 import bench
from phyai.models.pi05.captured import CapturedDenoise
from phyai.models.pi05.config import PI05Config
from phyai.models.pi05.keys import canonical
from phyai.models.pi05.loading import load_pi05
from phyai.models.pi05.main_pi05 import PI05Args
from phyai.models.pi05.runtime import PI05Runtime
from phyai.processing import ModelInputs, Observation, PolicyProcessor, ProcessingError
from phyai.serving import PolicyConfig, ServeConfig, ServerConfig
from phyai.serving.launch import running_server

SOURCES = [
    file
    for folder in sorted((Path(__file__).parents[2] / "packages").glob("*/src"))
    for file in sorted(folder.rglob("*.py"))
]


@pytest.fixture(scope="module")
def model(tiny_pi05):
    return load_pi05(tiny_pi05, device="cpu", params_dtype=torch.float32)


@pytest.fixture(scope="module")
def cases(tiny_pi05):
    return load_file(tiny_pi05 / "cases.safetensors")


def model_inputs(cases, group):
    """What the reference implementation got; absent images are black."""
    images, mask = cases[f"{group}.images"].float() / 127.5 - 1, cases[f"{group}.image_mask"]
    images[~mask] = -1.0
    tokens, token_mask = cases[f"{group}.tokens"], cases[f"{group}.token_mask"]
    return ModelInputs(images, mask, tokens, token_mask, None, ("",) * len(mask))


def test_case_79_each_stage_equals_the_reference_implementation(model, cases):
    """With fixed noise, each stage of π0.5 equals that of another implementation.

    Handled in phyai.models.pi05.
    """
    group = "mixed_cameras"
    inputs, noise = model_inputs(cases, group), cases[f"{group}.noise"]
    with torch.inference_mode():
        images = model.vision(inputs.images.flatten(0, 1)).unflatten(0, inputs.images.shape[:2])
        first = noise - model.sample_actions(inputs, noise=noise, num_steps=1)
        actions = model.sample_actions(inputs, noise=noise)
    for found, name in (
        (images, "stage.image_features"),
        (first, "stage.first_velocity"),
        (actions, "actions_10"),
    ):
        torch.testing.assert_close(found, cases[f"{group}.{name}"], atol=1e-5, rtol=0, msg=name)


def observation(tiny_pi05, seed=0):
    config = json.loads((tiny_pi05 / "config.json").read_text())
    draw = np.random.default_rng(seed)
    size = (*config["image_resolution"], 3)
    cameras = [key for key in config["input_features"] if ".images." in key]
    width = config["input_features"]["observation.state"]["shape"][0]
    return Observation(
        {key.rpartition(".")[2]: draw.integers(0, 256, size, dtype=np.uint8) for key in cameras},
        draw.uniform(-1, 1, width).astype(np.float32),
        "pick up the cup",
    )


def test_case_80_no_other_package_is_patched_or_needed(tiny_pi05, monkeypatch):
    """A policy loads and acts where transformers and openpi cannot be imported.

    Handled in phyai.models.pi05.
    """

    class Refuse:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in ("transformers", "openpi", "lerobot"):
                raise AssertionError(f"{name} was imported")

    monkeypatch.setattr(sys, "meta_path", [Refuse(), *sys.meta_path])
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("transformers", "openpi", "lerobot"):
            monkeypatch.delitem(sys.modules, name)
    device = DeviceConfig("cpu", torch.float32)
    args = EngineArgs("pi05", PI05Args(checkpoint_dir=tiny_pi05), EngineConfig(device=device))
    chunk = Engine(args).infer(observation(tiny_pi05), seed=0)
    assert np.isfinite(chunk.actions).all()
    patching = re.compile(r"^\s*(import|from) transformers\b|transformers_replace", re.MULTILINE)
    assert not [file for file in SOURCES if patching.search(file.read_text(encoding="utf-8"))]


def shape_of(folder):
    return PI05Config.read(folder, CheckpointReader(folder, canonical).shapes)


def statistics(folder):
    (file,) = folder.glob("policy_preprocessor*.safetensors")
    return load_file(file)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_case_82_placeholder_statistics_are_refused(tiny_pi05, tmp_path, value):
    """Statistics that are infinite placeholders are refused with feature, file and column.

    Handled in phyai.processing.normalize.
    """
    found = {name: torch.full_like(column, value) for name, column in statistics(tiny_pi05).items()}
    save_file(found, tmp_path / "stats.safetensors")
    with pytest.raises(ProcessingError, match=rf"q\d\d is {value} in column 0") as caught:
        PolicyProcessor.from_checkpoint(
            tiny_pi05, shape_of(tiny_pi05), stats=tmp_path / "stats.safetensors"
        )
    assert "stats.safetensors" in str(caught.value)


def test_case_83_a_state_is_normalised_without_an_action(tiny_pi05):
    """The state of an observation, which never brings an action, is normalised.

    Handled in phyai.processing.pipeline.
    """
    processor = PolicyProcessor.from_checkpoint(tiny_pi05, shape_of(tiny_pi05))
    seen, stats = observation(tiny_pi05), statistics(tiny_pi05)
    low, high = (stats[f"observation.state.{name}"].numpy() for name in ("q01", "q99"))
    edges = np.linspace(-1, 1, 257)[:-1]
    normal = 2 * (seen.state - low) / np.where(high > low, high - low, 1e-8) - 1
    bins = [int((value >= edges).sum()) - 1 for value in normal]
    (prompt,) = processor.preprocess([seen]).prompts
    assert f"State: {' '.join(map(str, bins))};" in prompt


def test_case_85_a_chunk_is_normalised_by_the_statistics_of_the_data(tiny_pi05):
    """Actions are scaled by the statistics of the data set, whatever else is in the chunk.

    Handled in phyai.processing.normalize, phyai.processing.pipeline.
    """
    processor = PolicyProcessor.from_checkpoint(tiny_pi05, shape_of(tiny_pi05))
    seen, width = observation(tiny_pi05), processor.spec.action_dim
    stats = statistics(tiny_pi05)
    low, high = (stats[f"action.{name}"].numpy()[:width] for name in ("q01", "q99"))
    draw = np.random.default_rng(0)
    rows = low + (high - low) * draw.uniform(-0.5, 1.5, (7, width))
    for chunk in (rows, rows[:1], np.repeat(rows[2:3], 5, axis=0), rows * 0 + low):
        normalized = processor.normalize_actions(chunk.astype(np.float32), seen)
        expected = 2 * (chunk - low) / np.where(high > low, high - low, np.inf) - 1
        np.testing.assert_allclose(normalized[:, :width], expected, atol=1e-5)
        back = processor.postprocess(torch.from_numpy(normalized)[None], [seen])[0]
        np.testing.assert_allclose(back, np.where(high > low, chunk, low), atol=1e-5)


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


def test_case_86_others_are_answered_while_the_policy_computes(tiny_pi05, monkeypatch):
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
                replies.append(client.infer(server.request(client, observation(tiny_pi05))))

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
    openpi_style = {b"__ndarray__": True, b"data": data, b"dtype": "|O", b"shape": [1]}
    for fields in (
        {key.encode(): value for key, value in numpy_style.items()},
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


def test_case_91_oversized_requests_are_refused_before_they_are_read(tiny_pi05):
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
            good = server.request(client, observation(tiny_pi05))
            bad = good | {client.metadata["image_keys"][0]: bomb}
            with pytest.raises(ServerError, match="8192 x 8192 pixels; at most 16777216 are read"):
                client.infer(bad)
        with PolicyClient(port=server.port) as client:
            assert np.isfinite(client.infer(good)["actions"]).all()
    lie = b"\xc6" + struct.pack(">I", 2**30)  # a gibibyte is said to follow
    with pytest.raises(CodecError, match="runs to byte"):
        unpackb(lie)


def test_case_92_what_is_read_is_listed_not_what_is_refused():
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
    assert not [file for file in SOURCES if unpickler.search(file.read_text(encoding="utf-8"))]


def test_case_94_other_prompts_record_no_new_graph(model, recorded):
    """After the warm-up, prompts of any length replay graphs that exist.

    Handled in phyai.models.pi05.runtime, phyai.models.pi05.staging.
    """
    runtime, config = PI05Runtime(model), model.config
    runtime.warm_up()
    count = len(recorded)
    cameras = len(config.cameras)
    for length in (0, 1, 7, config.tokenizer_max_length):
        tokens = torch.ones(1, config.tokenizer_max_length, dtype=torch.int64)
        mask = torch.arange(config.tokenizer_max_length)[None] < length
        images = torch.zeros(1, cameras, 3, *config.image_resolution)
        present = torch.ones(1, cameras, dtype=torch.bool)
        inputs = ModelInputs(images, present, tokens * mask, mask, None, ("",))
        found = runtime.sample_actions(inputs, seed=0)
        expected = model.sample_actions(inputs, seed=0)
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    assert len(recorded) == count == runtime.graphs()


class Clock:
    """Stands for a CUDA event; every record is one millisecond later."""

    now = 0

    def __init__(self, *, enable_timing):
        assert enable_timing

    def record(self):
        Clock.now += 1
        self.at = Clock.now

    def synchronize(self):
        pass

    def elapsed_time(self, later):
        return float(later.at - self.at)


def test_case_95_the_denoising_loop_is_one_graph_timed_by_events(
    model, cases, recorded, monkeypatch
):
    """All denoising steps are one replay, and the benchmark times replays by events.

    Handled in phyai.models.pi05.captured, phyai.models.pi05.bench.
    """
    inputs, noise = model_inputs(cases, "single"), cases["single.noise"]
    with torch.inference_mode():
        loop = CapturedDenoise(model, *model.encode_prefix(inputs))
        assert len(recorded) == 1
        actions = loop(*model.encode_prefix(inputs), noise)
    assert len(recorded) == 1
    torch.testing.assert_close(actions, cases["single.actions_10"], atol=1e-5, rtol=0)
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(bench, "kernel_times", lambda replay: [])
    setting = bench.Setting("one view", 1, 2, chunk=model.config.chunk_size)
    found = bench.measure(PI05Runtime(model), setting, replays=3)
    assert {stage: found["ms"][stage]["p50"] for stage in bench.STAGES} == dict.fromkeys(
        bench.STAGES, 1.0
    )
