"""A fake engine, pictures and a runner for the command line."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from phyai.cli import engines, main


@dataclass(frozen=True)
class FakeChunk:
    actions: np.ndarray
    normalized: np.ndarray
    timing_ms: dict[str, float]
    prompt: str


class FakeEngine:
    """Answers like an engine whose actions spell the seed."""

    def __init__(self, request: engines.EngineRequest, *, steps: int = 13, dims: int = 7) -> None:
        self.request = request
        self.calls: list[tuple[Any, dict[str, Any]]] = []
        self.steps, self.dims = steps, dims
        self.traces: list[Any] = []

    def infer(self, observation, **options):
        print("a library that prints")
        self.calls.append((observation, options))
        grid = np.arange(self.steps * self.dims, dtype=np.float32).reshape(self.steps, self.dims)
        normalized = np.zeros((self.steps, 32), np.float32)
        timing = {"preprocess": 1.25, "total": 12.5}
        return FakeChunk(
            grid + np.float32(options["seed"] or 0), normalized, timing, "Task: x;\nAction: "
        )

    def describe(self):
        return {"processing": {"preset": "lerobot"}, "params_dtype": "fp32"}

    def weight_bytes(self):
        return 4096

    def explain(self):
        return self.traces


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def phyai(capsys):
    """Run a command line in this process: ``phyai("run", "pi05", ...) -> Result``."""

    def run(*argv: object) -> Result:
        capsys.readouterr()
        code = main([str(word) for word in argv])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture
def fake_engine(monkeypatch):
    """Replace `build_engine`; the list collects the engines that commands built."""
    built: list[FakeEngine] = []

    def build(request):
        built.append(FakeEngine(request))
        return built[-1]

    monkeypatch.setattr(engines, "build_engine", build)
    return built


@pytest.fixture
def picture(tmp_path) -> Path:
    path = tmp_path / "scene.png"
    pixels = np.random.default_rng(0).integers(0, 256, (11, 17, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.fixture
def fake_module(monkeypatch):
    """Put a module with the given attributes into sys.modules for one test."""

    def put(name: str, **attributes: Any) -> ModuleType:
        module = ModuleType(name)
        for key, value in attributes.items():
            setattr(module, key, value)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return put
