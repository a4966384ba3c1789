"""The import contracts of pyproject.toml hold, and each of them notices a violation."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

VIOLATIONS = {
    "kernels import the engine": ("piper_kernels/__init__.py", "import phyai", "phyai needs"),
    "quant imports the engine": ("phyai_quant/plan.py", "import phyai", "phyai needs"),
    "dispatcher imports a model": (
        "phyai/dispatch/catalog.py",
        "import phyai.models.pi05",
        "Inside the engine",
    ),
    "plan imports torch": ("phyai_quant/plan.py", "import torch", "Which layer"),
    "importer imports kernels": (
        "phyai_quant/importers/base.py",
        "import piper_kernels.weights",
        "Which layer",
    ),
    "weights import linear": (
        "piper_kernels/weights/convrot/int8/tensor.py",
        "import piper_kernels.linear.convrot.int8",
        "Weight formats",
    ),
    "client imports torch": ("phyai/client/actions.py", "import torch", "The client runs"),
    "client imports the engine": (
        "phyai/client/codec.py",
        "import phyai.processing",
        "The client runs",
    ),
    "reference imports triton": (
        "piper_kernels/stochastic_quantization/reference.py",
        "import triton",
        "References stand",
    ),
}


def lint_imports(sources: list[Path], folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the contracts of the repository against ``sources``."""
    program = "import sys; from importlinter.cli import lint_imports_command as main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, "--no-cache", ROOT / "pyproject.toml"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sources)), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_contracts_hold(tmp_path: Path):
    result = lint_imports(sorted(ROOT.glob("packages/*/src")), tmp_path)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("violation", VIOLATIONS)
def test_a_violation_breaks_its_contract(violation: str, tmp_path: Path):
    module, line, contract = VIOLATIONS[violation]
    for source in ROOT.glob("packages/*/src"):
        shutil.copytree(source, tmp_path / "src", dirs_exist_ok=True)
    changed = tmp_path / "src" / module
    changed.write_text(f"{line}\n{changed.read_text()}")
    result = lint_imports([tmp_path / "src"], tmp_path)
    assert result.returncode != 0
    broken = [row for row in result.stdout.splitlines() if " BROKEN" in row]
    assert [row for row in broken if row.startswith(contract)], result.stdout + result.stderr
