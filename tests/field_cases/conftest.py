"""Checkpoints, a tiny policy, and graphs that are replayed on the CPU."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from phyai.processing import Observation

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "packages" / "phyai-engine" / "tests" / "fixtures"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Writes config.json with the inline config and hf_quant_config.json with the standalone."""

    def write(inline: object = None, standalone: object = None, **extra: object) -> Path:
        config = dict(extra)
        if inline is not None:
            config["quantization_config"] = inline
        (tmp_path / "config.json").write_text(json.dumps(config))
        if standalone is not None:
            (tmp_path / "hf_quant_config.json").write_text(json.dumps(standalone))
        return tmp_path

    return write


@pytest.fixture(scope="session")
def tiny_pi05() -> Path:
    """Folder of a random π0.5 policy of a few hundred kilobytes, with reference results."""
    return FIXTURES / "pi05_tiny"


@pytest.fixture
def observation(tiny_pi05: Path) -> Observation:
    """What a robot of this policy may send: drawn pictures and a drawn state."""
    config = json.loads((tiny_pi05 / "config.json").read_text())
    draw = np.random.default_rng(0)
    size = (*config["image_resolution"], 3)
    cameras = [key for key in config["input_features"] if ".images." in key]
    width = config["input_features"]["observation.state"]["shape"][0]
    return Observation(
        {key.rpartition(".")[2]: draw.integers(0, 256, size, dtype=np.uint8) for key in cameras},
        draw.uniform(-1, 1, width).astype(np.float32),
        "pick up the cup",
    )


@pytest.fixture(scope="session")
def sources() -> list[Path]:
    """Returns all modules of the three wheels."""
    folders = sorted((ROOT / "packages").glob("*/src"))
    return [file for folder in folders for file in sorted(folder.rglob("*.py"))]
