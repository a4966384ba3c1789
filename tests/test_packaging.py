"""The three wheels as built: what is in them, what they need, and that each stands alone."""

import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from configparser import ConfigParser
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from .wheel_builds import (
    PACKAGES,
    build,
    by_package,
    copy_checkout,
    differing,
    find_uv,
    leave_caches,
)

ROOT = Path(__file__).resolve().parent.parent

IMPORT_ALONE = ROOT / "tests" / "import_alone.py"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("build") / "first"
    copy_checkout(tree, modified=1.6e9)
    return tree


@pytest.fixture(scope="module")
def distributions(checkout: Path) -> dict[str, Path]:
    """Every wheel and source archive of the workspace, built without workspace sources."""
    return build(checkout)


@pytest.fixture(scope="module")
def wheels(distributions: dict[str, Path]) -> dict[str, Path]:
    return by_package(distributions.values(), ".whl")


def test_builds_of_one_tree_are_the_same_bytes(distributions, tmp_path):
    """Whenever its files were written, as in two checkouts of one commit, and used before."""
    copy_checkout(tmp_path / "second", modified=1.7e9)
    leave_caches(tmp_path / "second")
    again = build(tmp_path / "second")
    assert len(again) == 2 * len(PACKAGES)
    assert again.keys() == distributions.keys()
    assert differing(again, distributions) == []


def test_a_tree_and_its_source_archive_make_the_same_wheel(checkout, distributions):
    direct = build(checkout, "--wheel", out="direct")
    assert len(direct) == len(PACKAGES)
    assert differing(direct, distributions) == []


@pytest.mark.parametrize("name", PACKAGES)
def test_a_source_archive_holds_what_a_build_needs(distributions, name):
    archive = by_package(distributions.values(), ".gz")[name]
    top = archive.name.removesuffix(".tar.gz")
    with tarfile.open(archive) as opened:
        files = {m.name.removeprefix(f"{top}/") for m in opened.getmembers() if m.isfile()}
    assert {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml"} <= files
    assert sources_of(name) <= {file.removeprefix("src/") for file in files}
    assert [file for file in files if file.startswith(("tests/", "benchmarks/"))] == []


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
    assert [file for file in files if "_cache/" in file or "/." in file] == []


def sources_of(name: str) -> set[str]:
    """Return all files of a package: modules, the typing marker, pages of the server."""
    source = ROOT / "packages" / name / "src"
    files = {path for path in source.rglob("*") if path.is_file()}
    return {p.relative_to(source).as_posix() for p in files if p.suffix != ".pyc"}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_wheel_holds_every_file_of_its_source(wheels, name):
    with zipfile.ZipFile(wheels[name]) as archive:
        assert sources_of(name) <= set(archive.namelist())


@pytest.mark.parametrize("name", PACKAGES)
def test_the_metadata_is_complete(wheels, name):
    metadata = metadata_of(wheels[name])
    assert metadata["Name"] == name
    assert 20 < len(metadata["Summary"]) < 120
    assert metadata["Author"]
    assert len(metadata["Keywords"].split(",")) > 3
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] == ">=3.12"
    classifiers = set(metadata.get_all("Classifier"))
    python = {f"Programming Language :: Python :: {version}" for version in ("3.12", "3.13")}
    assert {"Typing :: Typed", "Development Status :: 3 - Alpha"} | python <= classifiers
    assert not [line for line in classifiers if line.startswith("License ::")], "obsolete"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert len(metadata.get_payload()) > 500, "the README is the page of the wheel"


COMMANDS = {
    "piper-kernels": {},
    "phyai-quant": {"phyai-quant": "phyai_quant.cli:main"},
    "phyai-engine": {"phyai": "phyai.cli:main"},
}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_wheel_installs_its_commands(wheels, name):
    with zipfile.ZipFile(wheels[name]) as archive:
        files = archive.namelist()
        tables = ConfigParser()
        for entry in files:
            if entry.endswith(".dist-info/entry_points.txt"):
                tables.read_string(archive.read(entry).decode())
    assert set(tables.sections()) <= {"console_scripts"}
    commands = dict(tables["console_scripts"]) if tables.sections() else {}
    assert commands == COMMANDS[name]
    for target in commands.values():
        assert f"{target.partition(':')[0].replace('.', '/')}/__init__.py" in files


def test_requirements_point_one_way(wheels):
    assert requirements_of(wheels["piper-kernels"]) == {"torch"}
    convrot = requirements_of(wheels["piper-kernels"], extra="convrot")
    # TorchAO imports NumPy, and neither it nor PyTorch asks for it.
    assert convrot == {"numpy", "safetensors", "torch", "torchao"}
    quant = requirements_of(wheels["phyai-quant"])
    assert quant & PACKAGES.keys() == {"piper-kernels"}
    assert "phyai-quant" in requirements_of(wheels["phyai-engine"])


def test_the_extras_of_piper_kernels_bring_their_packages(wheels):
    wheel = wheels["piper-kernels"]
    assert metadata_of(wheel).get_all("Provides-Extra") == ["convrot", "triton"]
    # PyTorch for Linux brings Triton along.
    triton = requirements_of(wheel, extra="triton")
    assert triton == {"torch", "triton-windows"}
    assert requirements_of(wheel, extra="convrot") | triton == {
        "numpy",
        "safetensors",
        "torch",
        "torchao",
        "triton-windows",
    }


def unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def import_alone(python: Path | str, folder: Path, modules: str, absent: Sequence[str]) -> None:
    """Import modules from a folder in a process of its own that does not find some packages."""
    result = subprocess.run(
        [python, "-P", IMPORT_ALONE, folder, modules, *absent],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_piper_kernels_alone_rounds_without_torchao_and_triton(wheels, tmp_path):
    folder = unpack(wheels["piper-kernels"], tmp_path / "piper")
    absent = ["torchao", "triton", "phyai", "phyai_quant"]
    import_alone(sys.executable, folder, "piper_kernels", absent)


# By package: what it brings along, what is imported, what nobody installed.
WITHOUT_EXTRAS = {
    "phyai-quant": (
        ["piper-kernels"],
        "phyai_quant,phyai_quant.importers,phyai_quant.offline",
        ["matplotlib", "phyai", "rich", "ruamel", "typer"],
    ),
    "phyai-engine": (
        ["piper-kernels", "phyai-quant"],
        "phyai,phyai.engine,phyai.cli",
        ["av", "matplotlib", "msgpack", "prometheus_client", "ray", "tensorstore", "websockets"],
    ),
}


@pytest.mark.parametrize("name", WITHOUT_EXTRAS)
def test_a_wheel_imports_without_its_extras(wheels, tmp_path, name):
    below, modules, absent = WITHOUT_EXTRAS[name]
    for package in [*below, name]:
        unpack(wheels[package], tmp_path)
    import_alone(sys.executable, tmp_path, modules, absent)


@pytest.mark.parametrize("name", WITHOUT_EXTRAS)
def test_every_extra_is_left_out_of_that_import(wheels, name):
    plain = requirements_of(wheels[name])
    extras = metadata_of(wheels[name]).get_all("Provides-Extra", [])
    brought = set().union(*(requirements_of(wheels[name], extra=e) for e in extras)) - plain
    imported = {package.replace("-", "_").removesuffix("_yaml") for package in brought}
    assert imported <= set(WITHOUT_EXTRAS[name][2])


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
    absent = ["torchao", "triton", "phyai", "phyai_quant"]
    import_alone(python, Path(site), "piper_kernels", absent)
