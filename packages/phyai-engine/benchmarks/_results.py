"""How the results of a benchmark are stored."""

import json
from pathlib import Path
from typing import Any


def store(document: dict[str, Any], output: Path | None) -> None:
    """Write results as JSON, at once or not at all: a reader never sees half of them.

    Args:
        document: The results.
        output: Where they go; its folder is made. None stores nothing.
    """
    if output is None:
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    draft = output.with_suffix(".part")
    draft.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    draft.replace(output)
