"""The application: its commands and exit codes."""

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Final

import typer

from phyai_quant.cli import compare, inspect, plan, quantize, validate
from phyai_quant.cli.output import print_error, print_json, print_warning
from phyai_quant.scheme import QuantConfigError

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

# Typer carries its own copy of Click, so the class is taken from the exported subclass.
_USAGE_ERROR: Final[type[Exception]] = typer.BadParameter.__mro__[1]

app: typer.Typer = typer.Typer(
    name="phyai-quant",
    help="Look at quantized checkpoints, check them, make them and compare them.\n\n"
    "Exit codes: 0 done, 1 what was asked failed, 2 the command line is wrong. "
    "With --json, stdout holds one JSON document and nothing else.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(name="inspect")(inspect.inspect_command)
app.command(name="validate")(validate.validate_command)
app.command(name="quantize")(quantize.quantize_command)
app.command(name="compare")(compare.compare_command)
app.command(name="plan")(plan.plan_command)


def _version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"phyai-quant {version('phyai-quant')}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    del version


def run(words: Sequence[str]) -> int:
    """Runs one command line and returns its exit code; faults of the program are raised."""
    _quiet_libraries()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            status = app(args=list(words), prog_name="phyai-quant", standalone_mode=False)
        sys.stdout.flush()
    except _USAGE_ERROR as error:
        return _fail(_usage_text(error), EXIT_USAGE, words)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe (`| head`) left. Nothing more can be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except QuantConfigError as error:
        return _fail(str(error), EXIT_FAILED, words)
    except OSError as error:
        named = error.filename is not None and error.strerror is not None
        text = f"{error.filename}: {error.strerror}" if named else str(error)
        return _fail(text, EXIT_FAILED, words)
    return status if isinstance(status, int) else EXIT_OK


def _fail(text: str, code: int, words: Sequence[str]) -> int:
    if text:
        print_error(text)
        if "--json" in words:
            print_json({"error": text})
    return code


def _usage_text(error: Exception) -> str:
    # The message is empty when the program was called without a command: its help is shown.
    message = error.format_message()  # pyright: ignore[reportAttributeAccessIssue]
    return message.removeprefix("Invalid value: ")


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print_warning(str(message))


def _quiet_libraries() -> None:
    """Keeps notices that libraries print while they are imported off the terminal."""
    for category in (SyntaxWarning, DeprecationWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category)
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
