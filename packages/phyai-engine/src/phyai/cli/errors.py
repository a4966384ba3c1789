"""What counts as a user error on the command line, and how it is printed."""

import errno
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import typer

# Typer carries its own copy of Click since 0.16, so the class is taken from the exported subclass.
USAGE_ERROR: Final[type[Exception]] = typer.BadParameter.__mro__[1]

# module, class. Only errors whose module is already loaded can have been raised, so that printing
# an error never imports a tensor library.
USER_ERRORS: Final = (
    ("phyai.dispatch", "PolicyError"),
    ("phyai.dispatch", "NoKernelError"),
    ("phyai.dispatch", "UnknownOperationError"),
    ("phyai.dispatch", "UnknownKernelError"),
    ("phyai.processing", "ProcessingError"),
    ("phyai.runtime.workers", "WorkerError"),
    ("phyai.checkpoints", "CheckpointError"),
    ("phyai.serving", "ReplicaError"),
    ("phyai_quant", "QuantConfigError"),
    ("torch", "OutOfMemoryError"),
)


_OS_HINTS: Final = {
    errno.EADDRINUSE: "pass another --port, or stop what listens there",
    errno.EACCES: "check who may read and write it",
    errno.ENOSPC: "free some space, or name another place",
}


class CliError(Exception):
    """A failure of what the user asked, with the next step.

    Attributes:
        message: What failed, the value seen and the values allowed.
        hint: What to do next; empty when the message says it.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def checked[Given, Parsed](option: str, parse: Callable[[Given], Parsed], value: Given) -> Parsed:
    """Return ``parse(value)``; its ValueError becomes a usage error that names `option`."""
    try:
        return parse(value)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


@dataclass(frozen=True)
class ErrorReport:
    """The text printed for an error: a message and, where there is one, the next step."""

    message: str
    hint: str = ""


def user_error_types() -> tuple[type[BaseException], ...]:
    """Return the exception classes of ``USER_ERRORS`` whose modules are loaded."""
    loaded = ((sys.modules.get(module), name) for module, name in USER_ERRORS)
    found = (getattr(module, name, None) for module, name in loaded if module is not None)
    return tuple(cls for cls in found if cls is not None)


def error_report(error: Exception) -> ErrorReport | None:
    """Return what to print for `error`, or None when it is a fault of the program.

    Args:
        error: Any exception that a command raised.
    """
    if isinstance(error, CliError):
        return ErrorReport(error.message, error.hint)
    if isinstance(error, OSError):
        return ErrorReport(_os_error_text(error), _OS_HINTS.get(error.errno or 0, ""))
    if not isinstance(error, user_error_types()):
        return None
    # KeyError quotes its argument in str().
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    hint = str(getattr(error, "hint", "") or "")
    if type(error).__name__ == "OutOfMemoryError" and not hint:
        hint = (
            "--dtype bf16 halves the weights; a kernel policy with quantization shrinks them more"
        )
    return ErrorReport(text, hint)


def _os_error_text(error: OSError) -> str:
    if error.filename is None or error.strerror is None:
        return str(error) or type(error).__name__
    return f"{os.fspath(error.filename)}: {error.strerror.lower()}"


def print_error(report: ErrorReport) -> None:
    """Write `report` to stderr: ``error: ...``, and ``hint: ...`` on its own line."""
    tty = sys.stderr.isatty()
    typer.secho("error: ", err=True, nl=False, fg="red" if tty else None, bold=tty)
    typer.echo(report.message, err=True)
    if report.hint:
        typer.secho("hint: ", err=True, nl=False, fg="yellow" if tty else None)
        typer.echo(report.hint, err=True)
