"""Tiny Cosmos3 repositories of random weights, written once for each process."""

from pathlib import Path
from typing import Any

import pytest
import torch

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


@pytest.fixture(scope="module")
def parts(tiny_nano: Path) -> dict[str, Any]:
    """What a pipeline of the tiny repository is made of."""
    return {
        "transformer": load_transformer(tiny_nano, params_dtype=torch.float32),
        "vae": load_vae(tiny_nano / "vae"),
        "tokenizer": Cosmos3Tokenizer.from_folder(tiny_nano / "text_tokenizer"),
        "sound_decoder": load_sound_decoder(tiny_nano / "sound_tokenizer"),
    }
