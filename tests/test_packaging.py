"""The three wheels as built: what is in them, what they need, and that each stands alone."""

import os
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "piper-kernels": "piper_kernels",
    "phyai-quant": "phyai_quant",
    "phyai-engine": "phyai",
}

# Imports from one folder, refuses some packages as if they were not installed, checks the maths.
STANDS_ALONE = """
import sys

wheel, *absent = sys.argv[1:]


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Absent())
sys.path.insert(0, wheel)
import torch
import piper_kernels
from piper_kernels.stochastic_quantization import stochastic_round_to_int

assert piper_kernels.__file__.startswith(wheel), piper_kernels.__file__


def rounded(seed):
    values = torch.full((2**14,), 0.25)
    return stochastic_round_to_int(
        values, seed=seed, quant_min=-128, quant_max=127,
        deterministic=values.round().to(torch.int64),
    )


first = rounded(7)
assert set(first.tolist()) == {0, 1}
assert abs(first.double().mean() - 0.25) < 0.02
assert torch.equal(first, rounded(7))
assert not torch.equal(first, rounded(8))
assert not {name.partition(".")[0] for name in sys.modules} & set(absent)
"""


def find_uv() -> str:
    """Return the uv that scripts/test uses, or skip the tests that need one."""
    private = ROOT / ".cache" / "uv" / "bin" / "uv"
    found = os.environ.get("UV") or shutil.which("uv") or (private.exists() and str(private))
    if not found:
        pytest.skip("uv is neither on PATH nor in .cache/uv: run scripts/test")
    return found


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every wheel of the workspace, built without workspace sources."""
    folder = tmp_path_factory.mktemp("dist")
    command = [find_uv(), "build", "--all-packages", "--no-sources", "--wheel", "--out-dir", folder]
    built = subprocess.run(
        [*command, "--python", sys.executable],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    found = {path.name.split("-")[0].replace("_", "-"): path for path in folder.glob("*.whl")}
    assert found.keys() == PACKAGES.keys()
    return found


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def requirements_of(wheel: Path, *, extra: str | None = None) -> set[str]:
    """Return the names that a wheel needs on its own, or with one extra."""
    lines = metadata_of(wheel).get_all("Requires-Dist", [])
    wanted = [line for line in lines if f"extra == '{extra}'" in line or "extra ==" not in line]
    separators = str.maketrans("[>=<;!~", "       ")
    return {line.translate(separators).split()[0] for line in wanted}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_wheel_holds_its_package_and_nothing_else(wheels, name):
    package = PACKAGES[name]
    with zipfile.ZipFile(wheels[name]) as archive:
        files = [entry for entry in archive.namelist() if not entry.endswith("/")]
    assert {file.split("/")[0].split("-")[0] for file in files} == {
        package,
        name.replace("-", "_"),
    }
    assert f"{package}/py.typed" in files
    assert any(file.endswith(".dist-info/licenses/LICENSE") for file in files)
    assert [file for file in files if "test" in file.split("/")[-1] or "/tests/" in file] == []
    assert [file for file in files if file.endswith((".pyc", ".so", ".log"))] == []


@pytest.mark.parametrize("name", PACKAGES)
def test_a_wheel_holds_every_module_of_its_source(wheels, name):
    source = ROOT / "packages" / name / "src"
    modules = {path.relative_to(source).as_posix() for path in source.rglob("*.py")}
    with zipfile.ZipFile(wheels[name]) as archive:
        assert modules <= set(archive.namelist())


@pytest.mark.parametrize("name", PACKAGES)
def test_the_metadata_is_complete(wheels, name):
    metadata = metadata_of(wheels[name])
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.12"
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert len(metadata.get_payload()) > 500, "the README is the page of the wheel"


def test_requirements_point_one_way(wheels):
    assert requirements_of(wheels["piper-kernels"]) == {"torch"}
    convrot = requirements_of(wheels["piper-kernels"], extra="convrot")
    assert convrot == {"safetensors", "torch", "torchao"}
    quant = requirements_of(wheels["phyai-quant"])
    assert quant & PACKAGES.keys() == {"piper-kernels"}
    assert "phyai-quant" in requirements_of(wheels["phyai-engine"])


def unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_piper_kernels_alone_rounds_without_torchao_and_triton(wheels, tmp_path):
    folder = unpack(wheels["piper-kernels"], tmp_path / "piper")
    absent = ["torchao", "triton", "phyai", "phyai_quant"]
    result = subprocess.run(
        [sys.executable, "-P", "-c", STANDS_ALONE, str(folder), *absent],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_phyai_quant_imports_without_the_engine(wheels, tmp_path):
    folder = unpack(wheels["piper-kernels"], tmp_path / "wheels")
    unpack(wheels["phyai-quant"], folder)
    check = (
        "import sys; sys.path.insert(0, sys.argv[1]); sys.modules['phyai'] = None;"
        "import phyai_quant; assert phyai_quant.__file__.startswith(sys.argv[1])"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-c", check, str(folder)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("PHYAI_TEST_REAL_INSTALL") != "1",
    reason="installs PyTorch into a fresh environment: set PHYAI_TEST_REAL_INSTALL=1",
)
def test_piper_kernels_installs_into_a_clean_environment(wheels, tmp_path):
    uv, environment = find_uv(), tmp_path / "venv"
    python = environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    constraints = tmp_path / "constraints.txt"
    torch_version = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.__version__.partition('+')[0])"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    constraints.write_text(f"torch=={torch_version}\n")
    pip = [uv, "pip", "install", "--quiet", "--python", python, "--constraint", constraints]
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, environment], check=True)
    subprocess.run([*pip, wheels["piper-kernels"]], check=True)
    # PyTorch for Linux brings Triton along.
    subprocess.run([uv, "pip", "uninstall", "--quiet", "--python", python, "triton"], check=True)
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    result = subprocess.run(
        [python, "-P", "-c", STANDS_ALONE, site, "torchao", "triton", "phyai", "phyai_quant"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
