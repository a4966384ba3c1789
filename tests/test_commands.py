"""scripts/test, scripts/demo and .ci/run: what they start, in which order, and what they return."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("ruff", "pyright", "lint-imports", "pytest", "python")

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the scripts need a POSIX shell")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of the commands whose environment holds tools that only note their arguments."""
    for name in ("scripts/test", "scripts/demo", ".ci/run"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "scripts" / "_bootstrap.sh").write_text(
        f'root={tmp_path}; cd "$root"; uv=uv; python="$root/.venv/bin/python"\n'
    )
    tools = tmp_path / ".venv" / "bin"
    tools.mkdir(parents=True)
    for name in TOOLS:
        tool = tools / name
        note = f'echo "{name} $*" >> "{tmp_path}/calls"'
        tool.write_text(f'#!/bin/sh\n{note}\n[ ! -e "{tmp_path}/fail-{name}" ]\n')
        tool.chmod(0o755)
    return tmp_path


def run(repository: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [repository / name, *arguments], capture_output=True, text=True, check=False
    )


def calls(repository: Path) -> list[str]:
    return (repository / "calls").read_text().splitlines()


EVERYTHING = [
    "ruff check .",
    "ruff format --check .",
    "pyright ",
    "lint-imports ",
    "pytest -q -n auto --dist worksteal --color=no",
]


@pytest.mark.parametrize("command", ["scripts/test", ".ci/run"])
def test_every_check_runs_and_pytest_comes_last(repository: Path, command: str):
    assert run(repository, command).returncode == 0
    assert [call.strip() for call in calls(repository)] == [call.strip() for call in EVERYTHING]


@pytest.mark.parametrize("failing", ["ruff", "pyright", "lint-imports", "pytest"])
def test_any_failure_fails_the_whole_and_hides_nothing(repository: Path, failing: str):
    (repository / f"fail-{failing}").touch()
    result = run(repository, "scripts/test")
    assert result.returncode != 0
    assert len(calls(repository)) == len(EVERYTHING)
    if failing != "pytest":
        assert "== failed so far:" in result.stdout
        assert f"\n  {failing}" in result.stdout


def test_arguments_go_to_pytest(repository: Path):
    run(repository, "scripts/test", "-k", "two  words")
    assert calls(repository)[-1] == "pytest -q -n auto --dist worksteal --color=no -k two  words"


def test_the_demo_gets_its_arguments(repository: Path):
    assert run(repository, "scripts/demo", "--episodes", "2").returncode == 0
    assert calls(repository) == ["python examples/pi05/reach/demo.py --episodes 2"]
