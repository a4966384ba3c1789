"""The ``phyai`` application: its commands and its exit codes."""

import itertools
import os
import sys
from collections.abc import Sequence

import typer

from phyai.cli import (
    bench,
    convert,
    deploy,
    doctor,
    evaluate,
    explain,
    inspect,
    policy,
    quant,
    replay,
    run,
    serve,
    tune,
)
from phyai.cli.errors import USAGE_ERROR, ErrorReport, error_report, print_error
from phyai.cli.output import print_json, quiet_libraries

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

app: typer.Typer = typer.Typer(
    name="phyai",
    help="Run robot policies and see which kernels they use.\n\n"
    "Exit codes: 0 done, 1 what was asked failed, 2 the command line is wrong. "
    "With --json, stdout holds one JSON document and nothing else, also when the command fails: "
    "then it has `error` and `hint`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(run.app, name="run")
app.add_typer(evaluate.app, name="eval")
app.add_typer(bench.app, name="bench")
app.command(name="serve")(serve.serve_command)
app.command(name="deploy")(deploy.deploy_command)
app.command(name="replay")(replay.replay_command)
app.command(name="explain")(explain.explain_command)
app.command(name="tune")(tune.tune_command)
app.add_typer(convert.app, name="convert")
app.command(name="inspect")(inspect.inspect_command)
app.command(name="doctor")(doctor.doctor_command)
app.add_typer(policy.app, name="policy")
app.command(name="quant", **quant.PASSED_ON)(quant.quant_command)


def _version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"phyai {version('phyai-engine')}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    del version


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line.

    Args:
        argv: Arguments after the program name; None takes those of the process.

    Returns:
        0 when done, 1 when what was asked failed, 2 for a wrong command line, 130 when interrupted.

    Raises:
        Exception: An error that is no user error, unchanged, with its traceback.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    quiet_libraries()
    try:
        status = app(args=words, prog_name="phyai", standalone_mode=False)
        sys.stdout.flush()
    except USAGE_ERROR as error:
        return _fail(_usage_report(error), EXIT_USAGE, words)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe (`| head`) left. Nothing more can be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except Exception as error:
        report = error_report(error)
        if report is None:
            raise
        return _fail(report, EXIT_FAILED, words)
    return status if isinstance(status, int) else EXIT_OK


def _fail(report: ErrorReport, code: int, words: Sequence[str]) -> int:
    if report.message:
        print_error(report)
        if _wants_json(words):
            print_json({"error": report.message, "hint": report.hint})
    return code


def _wants_json(words: Sequence[str]) -> bool:
    # Read from the words: where the command line itself is wrong there are no parsed options.
    pairs = itertools.pairwise(words)
    return "--json" in words or "--format=json" in words or ("--format", "json") in pairs


def _usage_report(error: Exception) -> ErrorReport:
    # The message is empty when a group was called without a command: its help is already shown.
    message = error.format_message()  # pyright: ignore[reportAttributeAccessIssue]
    message = message.removeprefix("Invalid value: ")
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "phyai"
    return ErrorReport(message, f"`{command} --help` lists what the command takes")
