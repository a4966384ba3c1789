"""Tiny Cosmos3 repositories of random weights, and the rows of tests on a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from phyai.dispatch.library import library_problem
from phyai.models.cosmos3.loading import load_transformer
from phyai.models.cosmos3.random_checkpoint import write_random_checkpoint
from phyai.models.cosmos3.sound import load_sound_decoder
from phyai.models.cosmos3.text import Cosmos3Tokenizer
from phyai.models.cosmos3.vae import load_vae


@pytest.fixture(scope="session")
def tiny_nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository like Cosmos3-Nano-Policy-DROID, with sound."""
    return write_random_checkpoint(tmp_path_factory.mktemp("cosmos3") / "nano", "nano")


@pytest.fixture(scope="session")
def tiny_edge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository like Cosmos3-Edge-Policy-DROID."""
    return write_random_checkpoint(tmp_path_factory.mktemp("cosmos3") / "edge", "edge")


@pytest.fixture(autouse=True)
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves FlashInfer out of tests on a GPU, which builds each of its modules for minutes."""

    def problem(name: str) -> str | None:
        return "left out of this test" if name == "flashinfer" else library_problem(name)

    if request.node.get_closest_marker("gpu") is not None:
        monkeypatch.setattr("phyai.dispatch.facts.library_problem", problem)


@pytest.fixture(scope="module")
def parts(tiny_nano: Path) -> dict[str, Any]:
    """What a pipeline of the tiny repository is made of."""
    return {
        "transformer": load_transformer(tiny_nano, params_dtype=torch.float32),
        "vae": load_vae(tiny_nano / "vae"),
        "tokenizer": Cosmos3Tokenizer.from_folder(tiny_nano / "text_tokenizer"),
        "sound_decoder": load_sound_decoder(tiny_nano / "sound_tokenizer"),
    }
