"""Tiny Cosmos3 repositories of random weights, written once for each process."""

from pathlib import Path

import pytest

from phyai.models.cosmos3.random_checkpoint import write_random_checkpoint


@pytest.fixture(scope="session")
def tiny_nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository like Cosmos3-Nano-Policy-DROID, with sound."""
    return write_random_checkpoint(tmp_path_factory.mktemp("cosmos3") / "nano", "nano")


@pytest.fixture(scope="session")
def tiny_edge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository like Cosmos3-Edge-Policy-DROID."""
    return write_random_checkpoint(tmp_path_factory.mktemp("cosmos3") / "edge", "edge")
