"""The script that runs compute-sanitizer over attention calls, with a sanitizer that pretends."""

import importlib.util
import stat
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[4] / "scripts" / "sanitize_attention.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("sanitize_attention", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pretend(tmp_path):
    """Return a function that makes a sanitizer which logs its arguments and exits."""

    def make(status):
        path = tmp_path / "compute-sanitizer"
        path.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/log\necho said\nexit {status}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return make


def test_every_tool_watches_every_call(script, pretend, tmp_path, capsys):
    assert script.main(["--sanitizer", pretend(0)]) == 0
    log = (tmp_path / "log").read_text().splitlines()
    assert len(log) == 2 * len(script.calls())
    for name in script.calls():
        for tool in ("memcheck", "racecheck"):
            assert any(f"--tool={tool} " in line and line.endswith(f"--run {name}") for line in log)
    assert capsys.readouterr().out.count("clean ") == len(log)


def test_what_a_tool_finds_fails(script, pretend, capsys):
    arguments = ["--sanitizer", pretend(script.ERROR_STATUS), "--calls", "D64 minmax"]
    assert script.main([*arguments, "--tools", "racecheck"]) == 1
    assert capsys.readouterr().out == "FAILED racecheck sparse D64 minmax: said\n"


def test_no_sanitizer_is_said(script, monkeypatch, capsys):
    monkeypatch.setattr(script, "find_sanitizer", lambda: None)
    assert script.main([]) == 2
    assert "--sanitizer" in capsys.readouterr().err


def test_a_text_that_no_call_contains_is_an_error(script, pretend, capsys):
    assert script.main(["--sanitizer", pretend(0), "--calls", "D96"]) == 2
    assert "no call contains ['D96']; calls: piper_attention D64 full" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_calls_run(script):
    for name in script.calls():
        script.run_call(name)
