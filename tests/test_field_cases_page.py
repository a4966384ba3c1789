"""docs/field-cases.md lists the field cases that are tested, and every case has a test.

``PIPER_WRITE_FIELD_CASES=1 pytest tests/test_field_cases_page.py`` writes the page.
"""

import ast
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "field_cases"
PAGE = ROOT / "docs" / "field-cases.md"
# Other numbers are not used.
NUMBERS = {
    1: (1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16, 17, 19, 20, 22, 23, 25, 26, 28, 29),
    2: (31, 32, 34, 35, 37, 38, 40, 41, 43, 44, 46, 47, 49, 50),
    3: (52, 53, 55, 56, 58, 59, 61, 62, 64, 65),
    4: (67, 68, 70, 71, 73, 74, 76, 77),
    5: (79, 80, 82, 83, 85, 86, 88, 89, 91, 92, 94, 95),
    6: (97, 98, 100, 101),
}
INTRODUCTION = """\
# Field cases

Faults that people met in other programs that do this work, each with what these packages do
instead and the test that fails when they no longer do. The page is written from the tests:
`PIPER_WRITE_FIELD_CASES=1 pytest tests/test_field_cases_page.py`.

A test that is known to fail is marked *open*; its cause stands in `tests/known_failures.toml`.
"""


@dataclass(frozen=True)
class Case:
    """One test of a field case.

    Attributes:
        number: Of the case.
        statement: What is right, in one sentence.
        modules: Where it is handled.
        test: Id of the test below the folder.
    """

    number: int
    statement: str
    modules: tuple[str, ...]
    test: str


def read(path: Path) -> tuple[str, list[Case]]:
    """Return the title of a section and its tests, in the order of the file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = []
    for node in tree.body:
        if not (isinstance(node, ast.FunctionDef) and node.name.startswith("test")):
            continue
        test = f"{path.name}::{node.name}"
        number = re.match(r"test_case_(\d\d\d?)_[a-z]", node.name)
        assert number, f"{test}: a test here is called test_case_NN_what_is_right"
        paragraphs = [
            " ".join(part.split()) for part in (ast.get_docstring(node) or "").split("\n\n")
        ]
        assert len(paragraphs) == 2, f"{test}: the docstring is a statement and 'Handled in ...'"
        handled = re.fullmatch(r"Handled in ([\w., ]+)\.", paragraphs[1])
        assert handled, f"{test}: {paragraphs[1]!r} is not 'Handled in module, module.'"
        modules = tuple(handled[1].split(", "))
        found.append(Case(int(number[1]), paragraphs[0], modules, test))
    return (ast.get_docstring(tree) or "").rstrip("."), found


def sections() -> dict[int, tuple[str, list[Case]]]:
    """Return titles and tests by number. The first file of a number with several has the title."""
    found: dict[int, tuple[str, list[Case]]] = {}
    for path in sorted(FOLDER.glob("test_*.py")):
        number = int(path.name.split("_")[1])
        title, cases = read(path)
        first, before = found.get(number, (title, []))
        found[number] = first, before + cases
    return found


SECTIONS = sections()
TESTS = [case for _, cases in SECTIONS.values() for case in cases]


def known_to_fail() -> set[str]:
    """Return the tests of the ledger, below the folder and without parameters."""
    entries = tomllib.loads((ROOT / "tests" / "known_failures.toml").read_text())["failure"]
    return {entry["test"].removeprefix("tests/field_cases/").partition("[")[0] for entry in entries}


def page() -> str:
    """Return the page as the tests tell it."""
    parts, failing = [INTRODUCTION], known_to_fail()
    for number, (title, cases) in SECTIONS.items():
        parts.append(f"\n## {number}. {title}\n\n| case | what is right | handled in | test |\n")
        parts.append("| --- | --- | --- | --- |\n")
        for case in sorted(cases, key=lambda case: case.number):
            statement = case.statement.replace("|", "\\|")
            if case.test in failing:
                statement = f"*Open:* {statement}"
            modules = ", ".join(f"`{name}`" for name in case.modules)
            parts.append(f"| {case.number} | {statement} | {modules} | `{case.test}` |\n")
    return "".join(parts)


@pytest.mark.parametrize("section", NUMBERS)
def test_every_case_has_a_test(section: int):
    assert {case.number for case in SECTIONS[section][1]} == set(NUMBERS[section])


@pytest.mark.parametrize("case", TESTS, ids=lambda case: case.test.partition("::")[2])
def test_a_case_names_modules_that_exist(case: Case):
    for name in case.modules:
        parts = Path(*name.split("."))
        places = [source / parts for source in ROOT.glob("packages/*/src")]
        found = [place for place in places if place.is_dir() or place.with_suffix(".py").is_file()]
        assert found, f"{case.test} is handled in {name}, which no wheel has"


def test_the_page_is_what_the_tests_tell():
    if os.environ.get("PIPER_WRITE_FIELD_CASES"):
        PAGE.write_text(page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "the tests changed; run PIPER_WRITE_FIELD_CASES=1 pytest tests/test_field_cases_page.py"
    )
