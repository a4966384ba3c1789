"""Which exceptions are user errors, and the text printed for them."""

import asyncio
import importlib
import socket
import subprocess
import sys

import pytest

from phyai.cli.errors import (
    USER_ERRORS,
    CliError,
    ErrorReport,
    error_report,
    print_error,
    user_error_types,
)


@pytest.mark.parametrize(("module", "name"), USER_ERRORS)
def test_every_listed_error_exists_and_is_reported(module, name):
    cls = getattr(importlib.import_module(module), name)
    assert cls in user_error_types()
    error = cls.__new__(cls)
    Exception.__init__(error, "what went wrong")
    assert "what went wrong" in error_report(error).message


def test_a_hint_of_the_exception_is_kept(fake_module):
    class PolicyError(ValueError):
        hint = "quote it"

    fake_module("phyai.dispatch", PolicyError=PolicyError)
    assert error_report(PolicyError("p.yaml:3: bad")) == ErrorReport("p.yaml:3: bad", "quote it")


def test_a_key_error_prints_without_quotes(fake_module):
    class UnknownOperationError(KeyError):
        pass

    fake_module("phyai.dispatch", UnknownOperationError=UnknownOperationError)
    report = error_report(UnknownOperationError("unknown operation 'gem'"))
    assert report == ErrorReport("unknown operation 'gem'")


def test_running_out_of_memory_has_a_hint(fake_module):
    class OutOfMemoryError(RuntimeError):
        pass

    fake_module("torch", OutOfMemoryError=OutOfMemoryError)
    report = error_report(OutOfMemoryError("CUDA out of memory"))
    assert "--dtype bf16" in report.hint


def test_file_errors_name_the_file(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        (tmp_path / "gone.yaml").read_text()
    assert (
        error_report(caught.value).message == f"{tmp_path / 'gone.yaml'}: no such file or directory"
    )
    assert error_report(OSError("disk on fire")).message == "disk on fire"


def test_a_port_that_is_taken_is_named_with_the_next_step():
    async def bind(port):
        await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", port)

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=str(port)) as caught:
            asyncio.run(bind(port))
    report = error_report(caught.value)
    assert str(port) in report.message
    assert "--port" in report.hint


def test_faults_of_the_program_are_not_hidden():
    assert error_report(ValueError("a bug")) is None
    assert error_report(KeyError("a bug")) is None


def test_the_report_is_plain_text_when_stderr_is_no_terminal(capsys):
    print_error(ErrorReport("it [b]failed[/b]", "do this"))
    print_error(ErrorReport("no hint"))
    captured = capsys.readouterr()
    assert captured.err == "error: it [b]failed[/b]\nhint: do this\nerror: no hint\n"
    assert captured.out == ""


def test_the_word_error_is_red_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    print_error(ErrorReport("failed"))
    assert "\x1b[31m" in capsys.readouterr().err


def test_a_cli_error_is_its_message():
    assert error_report(CliError("a", "b")) == ErrorReport("a", "b")
    assert str(CliError("a", "b")) == "a"


def test_reporting_an_error_loads_no_tensor_library():
    code = (
        "import sys\n"
        "from phyai.cli.errors import error_report\n"
        "error_report(FileNotFoundError(2, 'No such file', 'x'))\n"
        "error_report(ValueError('x'))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
