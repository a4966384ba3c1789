"""What the repository as a whole may and may not hold."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ("piper-kernels", "phyai-quant", "phyai-engine")
MAX_TREE_BYTES = 30 * 2**20

# A first letter in brackets keeps this file from matching itself.
REGISTRY_HOSTS = re.compile(
    r"[p]ypi\.(org|python)|[p]ythonhosted|[d]ownload\.pytorch\.org|[n]pmjs\.(org|com)|[a]stral\.sh"
)
UNFINISHED = re.compile(r"\b([T]ODO|[F]IXME|[X]XX|[H]ACK)\b")
MACHINE_PATHS = re.compile(r"(?<!\w)/([w]ork|[r]oot|tmp/[u]venv)/|[.]pyenv/versions/\d+\.\d+\.\d+")

# What would run code, or fetch it, when the wheels read a file that someone else wrote.
UNSAFE_READING = re.compile(
    r"^\s*(import|from) (pickle|dill|joblib|marshal|shelve)\b|\btorch\.load\(|allow_pickle=True"
    r"|\byaml\.(unsafe_)?load\(|typ=.unsafe."
)


# zsh reads the brackets of an extra as a pattern: what is typed into a shell has quotes, always the
# same ones.
BARE_EXTRA = re.compile(r"\bpip install [^\"`\[]*\w\[")


def tracked_files() -> list[Path]:
    """Return the files git tracks, or skip where this is not a git checkout."""
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in listing.stdout.split("\0") if name]
    return [file for file in files if file.is_file()]


def matches(pattern: re.Pattern[str], files: list[Path]) -> list[str]:
    """Return ``path:line: text`` of every line of a text file that matches."""
    found = []
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        found += [
            f"{file.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
            for number, line in enumerate(lines, 1)
            if pattern.search(line)
        ]
    return found


@pytest.mark.parametrize(
    ("pattern", "sample"),
    [
        (REGISTRY_HOSTS, "https://" + "pypi" + ".org/simple"),
        (UNFINISHED, "# " + "TO" + "DO: later"),
        (MACHINE_PATHS, "see /wo" + "rk/shared"),
    ],
    ids=["registry hosts", "unfinished words", "machine paths"],
)
def test_no_tracked_file_holds(pattern: re.Pattern[str], sample: str):
    assert pattern.search(sample)
    assert matches(pattern, tracked_files()) == []


def test_no_wheel_reads_files_in_a_way_that_runs_code():
    sources = [file for file in tracked_files() if "/src/" in file.as_posix()]
    assert sources
    assert matches(UNSAFE_READING, [file for file in sources if file.suffix == ".py"]) == []


@pytest.mark.parametrize(
    "sample", ["import pickle", "torch.load(path)", "allow_pickle=True", "yaml.load(f)"]
)
def test_unsafe_reading_is_recognised(sample: str):
    assert UNSAFE_READING.search(sample)
    assert not UNSAFE_READING.search("safetensors.torch.load_file(path); json.load(file)")


def test_extras_are_quoted_where_a_command_installs_them():
    pages_and_sources = [file for file in tracked_files() if file.suffix in (".md", ".py")]
    assert matches(BARE_EXTRA, pages_and_sources) == []


@pytest.mark.parametrize("names", ["wheel[extra]", "'wheel[extra]'", "-q ./a ./wheel[extra,more]"])
def test_extras_without_double_quotes_are_recognised(names: str):
    assert BARE_EXTRA.search(f"pip install {names}")
    assert not BARE_EXTRA.search('pip install -q ./a "./wheel[extra]"')


def test_the_tree_is_small():
    sizes = {file: file.stat().st_size for file in tracked_files()}
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:5]
    assert sum(sizes.values()) < MAX_TREE_BYTES, f"largest files: {largest}"


def test_the_lock_file_is_not_tracked():
    names = {file.relative_to(ROOT).as_posix() for file in tracked_files()}
    assert "uv.lock" not in names
    ignored = subprocess.run(["git", "check-ignore", "-q", "uv.lock"], cwd=ROOT, check=False)
    assert ignored.returncode == 0


def test_every_shell_command_is_executable():
    for name in ("scripts/demo", "scripts/test", ".ci/run"):
        mode = subprocess.run(
            ["git", "ls-files", "--stage", name],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert mode.startswith("100755"), f"{name} is not committed as executable"


@pytest.mark.parametrize("wheel", WHEELS)
def test_each_wheel_carries_the_licence_of_the_root(wheel: str):
    licence = (ROOT / "LICENSE").read_bytes()
    assert b"Apache License" in licence
    assert b"END OF TERMS AND CONDITIONS" in licence
    assert (ROOT / "packages" / wheel / "LICENSE").read_bytes() == licence


@pytest.mark.parametrize("wheel", WHEELS)
def test_the_changelog_names_the_version(wheel: str):
    folder = ROOT / "packages" / wheel
    version = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["version"]
    headings = re.findall(r"^## (.+)$", (folder / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings, "the changelog has no release heading"
    assert version in headings[0]


def links_of(page: Path) -> list[str]:
    """Return the relative link targets of one Markdown page."""
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    return [target for target in targets if "://" not in target]


def test_no_link_between_pages_is_dead():
    dead = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in tracked_files()
        if page.suffix == ".md"
        for target in links_of(page)
        if not (page.parent / target).exists()
    ]
    assert dead == []


def test_helpers_that_tests_import_by_name_have_names_of_their_own():
    """Tests find them on the search path, which is one for all of a run: the first one wins."""
    tests = [
        file
        for file in tracked_files()
        if file.suffix == ".py" and "tests" in file.relative_to(ROOT).parts[:-1]
    ]
    helpers = [file.stem for file in tests if not file.stem.startswith(("test_", "conftest", "__"))]
    repeated = {name for name in helpers if helpers.count(name) > 1}
    names = "|".join(sorted(repeated)) or "(?!)"
    assert matches(re.compile(rf"^\s*(from ({names}) import|import ({names})\b)"), tests) == []
