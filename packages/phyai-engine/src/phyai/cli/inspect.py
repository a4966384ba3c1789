"""``phyai inspect``: what a checkpoint folder holds, without loading its weights."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from phyai.cli import options
from phyai.cli.output import one_line, print_json, print_line, print_pairs

CheckpointFolder = Annotated[
    Path,
    typer.Argument(
        help="Folder with config.json and the .safetensors files, or a Cosmos3 repository.",
        metavar="DIR",
    ),
]


def inspect_command(
    checkpoint: CheckpointFolder,
    preset: options.Preset = None,
    stats: options.Stats = None,
    tokenizer: options.Tokenizer = None,
    json_output: options.Json = False,
) -> None:
    """Show layout, sizes, cameras, preset and statistics of a checkpoint; loads no weights.

    Of a Cosmos3 repository: its parts, its sizes and how its policy is asked.
    """
    from phyai.models.families import kernel_family

    if kernel_family(checkpoint) == "cosmos3":
        _inspect_cosmos3(checkpoint, json_output)
        return
    summary = _summary(checkpoint)
    summary["processing"] = _processing(checkpoint, summary.pop("config"), preset, stats, tokenizer)
    if json_output:
        print_json(summary)
        return
    _print_summary(summary)


def _inspect_cosmos3(checkpoint: Path, json_output: bool) -> None:
    from phyai.cli.inspect_cosmos3 import print_summary, summary

    found = summary(checkpoint)
    if json_output:
        print_json(found)
        return
    print_summary(found)


def _summary(checkpoint: Path) -> dict[str, Any]:
    from phyai.checkpoints import CheckpointReader
    from phyai.models.pi05.config import PI05Config
    from phyai.models.pi05.keys import canonical

    reader = CheckpointReader(checkpoint, canonical)
    config = PI05Config.read(checkpoint, reader.logical_shapes())
    return {
        "checkpoint": checkpoint,
        "config": config,
        **asdict(config),
        "tensors": len(reader.shapes),
        "tensors_unused": len(reader.ignored),
        "dtypes": dict(Counter(reader.dtypes.values())),
        "bytes_on_disk": reader.bytes_on_disk(),
    }


def _processing(
    checkpoint: Path, config: Any, preset: str | None, stats: Path | None, tokenizer: Path | None
) -> dict[str, Any]:
    """Return the description of the processors, or why they cannot be built."""
    from phyai.processing import PolicyProcessor, ProcessingError

    try:
        processor = PolicyProcessor.from_checkpoint(
            checkpoint,
            config,
            preset=preset,
            stats=stats,
            tokenizer=tokenizer,
            allow_identity_norm=True,
        )
    except ProcessingError as error:
        return {"problem": str(error)}
    return processor.describe()


def _print_summary(summary: dict[str, Any]) -> None:
    height, width = summary["image_resolution"]
    dtypes = ", ".join(f"{count} x {name}" for name, count in summary["dtypes"].items())
    print_pairs(
        [
            ("checkpoint", summary["checkpoint"]),
            ("family", f"{summary['family']}, {summary['layout']} layout"),
            ("tensors", f"{summary['tensors']} ({dtypes}), {summary['tensors_unused']} unused"),
            ("on disk", f"{summary['bytes_on_disk'] / 2**20:.1f} MiB"),
            ("cameras", f"{', '.join(summary['cameras'])}  at {height}x{width}"),
            ("state", f"{summary['state_dim']} of {summary['max_state_dim']} columns"),
            ("action", f"{summary['action_dim']} of {summary['max_action_dim']} columns"),
            ("chunk", f"{summary['chunk_size']} actions, {summary['num_steps']} flow steps"),
            ("prompt", f"{summary['tokenizer_max_length']} slots"),
            *((part, _sizes(summary[part])) for part in ("vision", "language", "expert")),
        ]
    )
    print_line()
    print_line("processing")
    print_pairs([(f"  {name}", _text(value)) for name, value in summary["processing"].items()])


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(str(item) for item in value) or "none"
    return one_line(str(value)) if value != {} else "none"


def _sizes(sizes: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sizes.items())
