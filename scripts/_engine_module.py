"""Loads modules of phyai-engine alone, in environments that do not have the engine."""

import importlib.util
from pathlib import Path
from typing import Any

ENGINE = Path(__file__).parents[1] / "packages/phyai-engine"


def cosmos3_module(name: str) -> Any:
    """Returns a module of `phyai.models.cosmos3` that imports nothing of the engine."""
    source = ENGINE / f"src/phyai/models/cosmos3/{name}.py"
    spec = importlib.util.spec_from_file_location(name, source)
    if spec is None or spec.loader is None:
        raise ImportError(source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
