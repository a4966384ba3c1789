"""Puts the example's folder on the path, and gives what several tests need."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


@pytest.fixture(scope="session")
def statistics():
    from reach.data import dataset_statistics

    return dataset_statistics(4096)


@pytest.fixture(scope="session")
def prompts(statistics):
    from reach.prompts import PromptTable
    from reach.tokenizer import build_tokenizer

    return PromptTable.build(build_tokenizer(), statistics.state)


@pytest.fixture(scope="session")
def small_config():
    """The shipped shape with every width halved or more."""
    from dataclasses import replace

    from reach.sizes import reach_config

    config = reach_config()
    return replace(
        config,
        max_state_dim=5,
        max_action_dim=3,
        num_steps=2,
        vision=replace(config.vision, width=64, layers=1, heads=1, mlp=32),
        language=replace(config.language, width=64, layers=2, heads=2, head_dim=32, mlp=96),
        expert=replace(config.expert, width=32, layers=2, heads=2, head_dim=32, mlp=64),
    )
