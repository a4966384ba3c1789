"""The command ``phyai-quant``: look at checkpoints, check, quantize and compare them."""

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line.

    Args:
        argv: Arguments after the program name; None takes those of the process.

    Returns:
        0 when done, 1 when what was asked failed, 2 for a wrong command line, 130 when interrupted.
    """
    try:
        from phyai_quant.cli.app import run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.stderr.write(
            f"error: the command needs the package {error.name}\n"
            'hint: pip install "phyai-quant[cli]"\n'
        )
        return 1
    return run(list(sys.argv[1:] if argv is None else argv))


__all__ = ["main"]
