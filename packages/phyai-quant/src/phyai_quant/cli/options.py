"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
CheckpointDir = Annotated[
    Path, typer.Argument(help="Folder with config.json and .safetensors files.", metavar="DIR")
]
Policy = Annotated[
    Path,
    typer.Option(
        "--policy",
        help="YAML or JSON file with a `quantization` section, or a plan file.",
        metavar="FILE",
        show_default=False,
    ),
]
