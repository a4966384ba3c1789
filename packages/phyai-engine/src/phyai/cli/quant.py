"""``phyai quant``: the command ``phyai-quant`` under the engine's name."""

from typing import Any

import typer

PASSED_ON: dict[str, Any] = {
    "add_help_option": False,
    "context_settings": {
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "allow_interspersed_args": False,
    },
}
"""How the command is registered: all of its words, --help too, belong to ``phyai-quant``."""


def quant_command(context: typer.Context) -> int:
    """Inspect, validate, quantize and compare quantized checkpoints, as phyai-quant does."""
    from phyai_quant.cli import main

    return main(context.args)
