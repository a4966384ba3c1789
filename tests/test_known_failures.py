"""Every entry of the ledger of known failures names a test, its cause and when it is to pass."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ENTRIES = tomllib.loads((ROOT / "tests" / "known_failures.toml").read_text())["failure"]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["test"].rpartition("::")[2])
def test_the_entry_names_a_test_and_a_cause(entry):
    path, _, name = entry["test"].partition("::")
    assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text()
    assert len(entry["reason"]) > 20
    assert len(entry["condition"]) > 20
    assert set(entry) == {"test", "reason", "condition"}


def test_entries_are_not_repeated():
    assert len({entry["test"] for entry in ENTRIES}) == len(ENTRIES)


def test_a_failure_is_expected_only_through_the_ledger():
    marker = "mark." + "xfail"
    tests = [*ROOT.glob("packages/*/tests/**/*.py"), *ROOT.glob("tests/**/*.py")]
    assert not [path for path in tests if marker in path.read_text()]
