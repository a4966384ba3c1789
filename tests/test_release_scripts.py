"""scripts/check_release.py and scripts/oldest_requirements.py."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ("piper-kernels", "phyai-quant", "phyai-engine")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_release = script("check_release")
oldest_requirements = script("oldest_requirements")


@pytest.fixture
def tree(tmp_path):
    """A checkout in which every wheel is ready to be released as 1.4.0."""

    def write(wheel, *, version="1.4.0", heading="1.4.0 (2030-01-31)", needs=()):
        folder = tmp_path / "packages" / wheel
        folder.mkdir(parents=True, exist_ok=True)
        lines = ", ".join(f'"{line}"' for line in needs)
        (folder / "pyproject.toml").write_text(
            f'[project]\nname = "{wheel}"\nversion = "{version}"\ndependencies = [{lines}]\n'
        )
        (folder / "CHANGELOG.md").write_text(f"# Changelog\n\n## {heading}\n\n## 1.3.0\n")
        return tmp_path

    for wheel in WHEELS:
        write(wheel)
    write.root = tmp_path
    return write


@pytest.mark.parametrize("wheel", WHEELS)
def test_this_tree_can_be_released(wheel):
    version = check_release.project(ROOT, wheel)["version"]
    changelog = (ROOT / "packages" / wheel / "CHANGELOG.md").read_text(encoding="utf-8")
    released = f"## {version} (" in changelog
    tag = ["--tag", f"{wheel}-v{version}"] if released else []
    assert check_release.main([wheel, *tag]) == 0


@pytest.mark.parametrize("wheel", WHEELS)
def test_a_changelog_can_be_read_in_a_minute(wheel):
    changelog = (ROOT / "packages" / wheel / "CHANGELOG.md").read_text(encoding="utf-8")
    first = re.split(r"^## ", changelog, flags=re.MULTILINE)[1]
    assert len(first.splitlines()) <= 80
    entries = re.findall(r"^\* (.+)$", first, re.MULTILINE)
    assert len(entries) > 5
    assert len(set(entries)) == len(entries)


@pytest.mark.parametrize(
    ("heading", "tag", "status"),
    [
        ("1.4.0 (2030-01-31)", "phyai-quant-v1.4.0", 0),
        ("1.4.0 (2030-01-31)", None, 0),
        ("Unreleased (1.4.0)", None, 0),
        ("Unreleased (1.4.0)", "phyai-quant-v1.4.0", 1),
        ("1.4.0", "phyai-quant-v1.4.0", 1),
        ("1x4.0 (2030-01-31)", "phyai-quant-v1.4.0", 1),
        ("1.4.01 (2030-01-31)", None, 1),
        ("Unreleased (1.3.0)", None, 1),
        ("1.4.0 (2030-01-31)", "phyai-quant-v1.4.1", 1),
        ("1.4.0 (2030-01-31)", "piper-kernels-v1.4.0", 1),
    ],
)
def test_tag_metadata_and_changelog_name_one_version(tree, capsys, heading, tag, status):
    root = tree("phyai-quant", heading=heading)
    arguments = ["phyai-quant", *(["--tag", tag] if tag else [])]
    assert check_release.main(arguments, root) == status
    said = capsys.readouterr().out
    assert said.startswith("error: phyai-quant: ") if status else said == ""


@pytest.mark.parametrize(
    ("needs", "says"),
    [
        ("piper-kernels[convrot]>=1.4.0,<1.5", None),
        ("piper-kernels>=1.5.0,<1.6", "excludes piper-kernels 1.4.0"),
        ("piper-kernels>=1.3.0,<1.4", "excludes piper-kernels 1.4.0"),
        ("piper-kernels>=1.4.0", "is not of the form"),
    ],
)
def test_wheels_of_one_tree_fit_together(tree, capsys, needs, says):
    root = tree("phyai-quant", needs=["numpy", needs])
    assert check_release.main(["phyai-quant"], root) == int(says is not None)
    assert (says or "") in capsys.readouterr().out


def test_the_oldest_versions_are_those_of_the_metadata(tmp_path):
    for wheel, needs, extra in (
        ("piper-kernels", "torch>=2.11", "torchao>=0.17"),
        ("phyai-quant", "ruamel.yaml>=0.18.6", "piper-kernels[convrot]>=0.1.0,<0.2"),
        ("phyai-engine", "torch>=2.11", "ray[serve]>=2.40; sys_platform == 'linux'"),
    ):
        folder = tmp_path / "packages" / wheel
        folder.mkdir(parents=True)
        (folder / "pyproject.toml").write_text(
            f'[project]\ndependencies = ["{needs}"]\n'
            f'[project.optional-dependencies]\nmore = ["{extra}"]\n'
        )
    assert oldest_requirements.oldest(tmp_path) == [
        "ray==2.40; sys_platform == 'linux'",
        "ruamel.yaml==0.18.6",
        "torch==2.11",
        "torchao==0.17",
    ]
    text = (folder / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text(text.replace("torch>=2.11", "torch>=2.12"))
    with pytest.raises(ValueError, match=r"phyai-engine: torch is 'torch==2.12' here"):
        oldest_requirements.oldest(tmp_path)
    (folder / "pyproject.toml").write_text(text.replace("torch>=2.11", "torch"))
    with pytest.raises(ValueError, match=r"'torch' states no oldest version"):
        oldest_requirements.oldest(tmp_path)


def test_every_requirement_of_the_wheels_states_its_oldest_version():
    pinned = oldest_requirements.oldest()
    assert len(pinned) > 15
    assert not [line for line in pinned if line.startswith(WHEELS)]
