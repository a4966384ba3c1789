"""scripts/_bootstrap.sh on machines that have more or less than it needs."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BASICS = ("sh", "dirname", "rm", "mkdir", "cat", "chmod")

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the scripts need a POSIX shell")

UV = """#!{sh}
if [ "$1" = --version ]; then echo "uv {version} (test)"; exit 0; fi
echo "$* UV_PYTHON=${{UV_PYTHON:-none}}" >> "{log}"
failures=$(cat "{failures}")
case "$failures" in
    1*) echo "${{failures#1}}" > "{failures}"; exit 1 ;;
esac
"""

# Acts `-c` by its exit status, `-m venv DIR` and `-m pip install [--target DIR] uv`.
PYTHON = """#!{sh}
case "$*" in
    -c*sys.executable*) echo "$0" ;;
    -c*) exit {too_old} ;;
    "-m venv "*)
        [ {venv} = works ] || exit 1
        mkdir -p "$3/bin"
        echo "#!{sh}
echo venv >> {log}
cat {uv} > $3/bin/uv; chmod +x $3/bin/uv" > "$3/bin/python"
        chmod +x "$3/bin/python" ;;
    "-m pip install --quiet --target "*)
        [ {pip} = works ] || exit 1
        echo target >> {log}
        mkdir -p "$6/bin"; cat {uv} > "$6/bin/uv"; chmod +x "$6/bin/uv" ;;
esac
"""


@dataclass
class Machine:
    """A folder that acts as a whole machine: its PATH, its home and a copy of the repository."""

    folder: Path

    def __post_init__(self) -> None:
        self.log, self.failures = self.folder / "log", self.folder / "failures"
        self.bin, self.repository = self.folder / "bin", self.folder / "repository"
        self.failures.write_text("0")
        self.log.touch()
        self.bin.mkdir()
        (self.repository / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "_bootstrap.sh", self.repository / "scripts")
        entry = '. "$(dirname -- "$0")/_bootstrap.sh"\necho "ready $uv $python"\n'
        (self.repository / "scripts" / "entry").write_text(entry)
        for name in BASICS:
            (self.bin / name).symlink_to(shutil.which(name))
        self.write(self.folder / "uv-to-fetch", self.uv_text("0.9.0"))

    def write(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def uv_text(self, version: str) -> str:
        return UV.format(sh=self.bin / "sh", version=version, log=self.log, failures=self.failures)

    def add_uv(self, version: str) -> None:
        self.write(self.bin / "uv", self.uv_text(version))

    def add_python(self, name: str, *, recent: bool, venv: bool = True, pip: bool = True) -> None:
        text = PYTHON.format(
            sh=self.bin / "sh",
            too_old=0 if recent else 1,
            venv="works" if venv else "missing",
            pip="works" if pip else "missing",
            log=self.log,
            uv=self.folder / "uv-to-fetch",
        )
        self.write(self.bin / name, text)

    def run(self, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.bin / "sh", self.repository / "scripts" / "entry"],
            env={"PATH": str(self.bin), "HOME": str(self.folder), **environment},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_uv_and_a_recent_python_on_path_are_used(machine: Machine):
    machine.add_uv("0.8.0")
    machine.add_python("python3", recent=False)
    machine.add_python("python3.12", recent=True)
    result = machine.run()
    assert result.stdout == f"ready uv {machine.repository.resolve()}/.venv/bin/python\n"
    assert machine.calls() == [f"sync --quiet UV_PYTHON={machine.bin}/python3.12"]


def test_a_python_of_pyenv_is_found(machine: Machine):
    machine.add_uv("1.0.0")
    machine.add_python("python3", recent=False)
    pyenv = machine.folder / ".pyenv" / "versions" / "3.13.2" / "bin"
    pyenv.mkdir(parents=True)
    machine.add_python("spare", recent=True)
    (machine.bin / "spare").rename(pyenv / "python")
    assert machine.run().returncode == 0
    assert machine.calls() == [f"sync --quiet UV_PYTHON={pyenv}/python"]


def test_without_a_recent_python_uv_chooses(machine: Machine):
    machine.add_uv("0.9.0")
    machine.add_python("python3", recent=False)
    assert machine.run().returncode == 0
    assert machine.calls() == ["sync --quiet UV_PYTHON=none"]


def test_the_python_of_the_caller_is_kept(machine: Machine):
    machine.add_uv("0.9.0")
    machine.add_python("python3.13", recent=True)
    assert machine.run(UV_PYTHON="/opt/python").returncode == 0
    assert machine.calls() == ["sync --quiet UV_PYTHON=/opt/python"]


@pytest.mark.parametrize("version_on_path", [None, "0.7.22"])
def test_a_missing_or_old_uv_is_replaced_by_a_private_one(machine: Machine, version_on_path):
    if version_on_path:
        machine.add_uv(version_on_path)
    machine.add_python("python3", recent=True)
    result = machine.run()
    private = machine.repository.resolve() / ".cache" / "uv" / "bin" / "uv"
    assert f"ready {private} " in result.stdout
    assert machine.calls() == ["venv", f"sync --quiet UV_PYTHON={machine.bin}/python3"]


def test_a_private_uv_is_installed_once(machine: Machine):
    machine.add_python("python3", recent=True)
    assert machine.run().returncode == 0
    assert machine.run().returncode == 0
    assert machine.calls().count("venv") == 1


def test_a_python_without_venv_installs_uv_beside_itself(machine: Machine):
    machine.add_python("python3", recent=False, venv=False)
    assert machine.run().returncode == 0
    assert machine.calls() == ["target", "sync --quiet UV_PYTHON=none"]


def test_a_python_that_can_install_nothing_is_said(machine: Machine):
    machine.add_python("python3", recent=True, venv=False, pip=False)
    result = machine.run()
    assert result.returncode == 1
    assert "Install uv by hand, put it on PATH" in result.stderr
    assert "ready" not in result.stdout


def test_a_failing_sync_is_tried_once_more(machine: Machine):
    machine.add_uv("0.9.0")
    machine.failures.write_text("1")
    result = machine.run()
    assert "ready" in result.stdout
    assert [call.split(" UV_")[0] for call in machine.calls()] == ["sync --quiet", "sync"]


def test_a_sync_that_fails_twice_ends_the_command(machine: Machine):
    machine.add_uv("0.9.0")
    machine.failures.write_text("11")
    result = machine.run()
    assert result.returncode == 1
    assert "ready" not in result.stdout
