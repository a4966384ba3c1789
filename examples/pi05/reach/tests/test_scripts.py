"""The commands of the README, as scripts and on the smallest possible run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1]


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(FOLDER / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_train_evaluate_and_draw(tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "checkpoint"
    small = ("--device", "cpu", "--steps", "1", "--batch", "2", "--episodes", "1")
    assert "exported step 1" in run("train.py", *small, "--out", str(out))
    assert json.loads((out / "training.json").read_text())["evaluations"][0]["step"] == 1
    report = run("evaluate.py", str(out), "--episodes", "1", "--execute", "16")
    assert "of 1 episodes" in report
    picture = tmp_path / "rollout.png"
    run("rollout.py", str(out), "--execute", "16", "--out", str(picture))
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize("script", ["train.py", "evaluate.py", "rollout.py"])
def test_readme_names_real_options(script):
    """Every option of a README command exists in its script."""
    lines = (FOLDER / "README.md").read_text().splitlines()
    shown = [line for line in lines if line.startswith(f"python examples/pi05/reach/{script}")]
    assert len(shown) == 1
    options = [word for word in shown[0].split() if word.startswith("--")]
    source = (FOLDER / script).read_text()
    for option in options:
        field = option.removeprefix("--")
        assert f'"{option}"' in source or f"    {field}: " in source, option
