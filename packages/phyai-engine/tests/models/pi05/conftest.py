"""What LeRobot computed for the tiny policies under ``tests/fixtures``."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phyai.models.pi05.loading import load_pi05
from phyai.models.pi05.model import PI05Model
from phyai.models.pi05.savings import Savings
from phyai.processing import ModelInputs

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"

type Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Golden:
    """A tiny checkpoint and the cases that LeRobot ran on it."""

    checkpoint: Path
    cases: Tensors

    def inputs(self, group: str) -> ModelInputs:
        """The inputs of a group; absent images are black."""
        pixels = self.cases[f"{group}.images"].float() / 255.0 * 2.0 - 1.0
        image_mask = self.cases[f"{group}.image_mask"]
        pixels[~image_mask] = -1.0
        return ModelInputs(
            images=pixels,
            image_mask=image_mask,
            tokens=self.cases[f"{group}.tokens"],
            token_mask=self.cases[f"{group}.token_mask"],
            state=self.cases[f"{group}.state"],
            prompts=("",) * len(image_mask),
        )

    def noise(self, group: str) -> Tensor:
        return self.cases[f"{group}.noise"]

    def actions(self, group: str, num_steps: int = 10, *, bf16: bool = False) -> Tensor:
        return self.cases[f"{group}.actions_{num_steps}{'_bf16' if bf16 else ''}"]

    def stage(self, name: str) -> Tensor:
        return self.cases[f"mixed_cameras.stage.{name}"]


@cache
def _golden(family: str) -> Golden:
    checkpoint = FIXTURES / f"{family}_tiny"
    return Golden(checkpoint, load_file(checkpoint / "cases.safetensors"))


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Golden]:
    """Returns the golden data of a family."""
    return _golden


@pytest.fixture(scope="session")
def load_model() -> Callable[..., PI05Model]:
    """Loads the tiny checkpoint of a family; each combination once in a session."""

    @cache
    def load(
        family: str,
        dtype: torch.dtype = torch.float32,
        savings: Savings | None = None,
        device: str = "cpu",
    ) -> PI05Model:
        chosen = Savings.all() if savings is None else savings
        checkpoint = _golden(family).checkpoint
        return load_pi05(checkpoint, device=device, params_dtype=dtype, savings=chosen)

    return load


@pytest.fixture
def write_variant(tmp_path: Path) -> Callable[..., Path]:
    """Copies a tiny checkpoint with changed tensors and, if given, another ``config.json``."""

    def write(
        family: str,
        edit: Callable[[Tensors], Tensors] = lambda tensors: tensors,
        config: dict[str, object] | None = None,
    ) -> Path:
        source, target = _golden(family).checkpoint, tmp_path / "checkpoint"
        target.mkdir()
        for name in ("config.json", "phyai_config.json"):
            shutil.copy(source / name, target / name)
        if config is not None:
            (target / "config.json").write_text(json.dumps(config))
        edited = edit(load_file(source / "model.safetensors"))
        save_file(edited, target / "model.safetensors")
        return target

    return write
