"""Reads the small files beside the weights."""

import json
from pathlib import Path
from typing import Any

from phyai.checkpoints.errors import CheckpointError


def read_json_object(path: Path) -> dict[str, Any]:
    """Returns the contents of a file such as ``config.json``.

    Raises:
        CheckpointError: if there is no such file, or it is not a JSON object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist; pass the folder that holds it") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); copy it again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold an object, it holds a {type(values).__name__}")
    return values
