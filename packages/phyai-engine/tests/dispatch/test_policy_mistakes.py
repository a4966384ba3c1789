"""docs/policy-mistakes.md says what the loader says."""

import runpy
from pathlib import Path

import pytest

from phyai.dispatch.policy_schema import policy_schema
from phyai.dispatch.policy_yaml import parse_document

FOLDER = Path(__file__).parent
DATA = runpy.run_path(str(FOLDER / "policy_mistakes.py"))
MISTAKES = DATA["MISTAKES"]
Checker = runpy.run_path(str(FOLDER / "json_schema.py"))["Checker"]
UNREADABLE = ("a key written twice", "broken YAML", "a date where text belongs", "a merge key")


def test_the_page_shows_the_messages_of_the_loader(tmp_path):
    assert len(MISTAKES) == 30
    assert DATA["PAGE"].read_text(encoding="utf-8") == DATA["page"](tmp_path), (
        "run policy_mistakes.py to write the page anew"
    )


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.title)
def test_a_mistake_is_reported_at_its_line(mistake, tmp_path):
    line, message = mistake.message(tmp_path)
    assert line == mistake.line
    assert message


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.title)
def test_an_editor_sees_the_mistake_where_a_schema_can_say_it(mistake, catalog):
    if mistake.title in UNREADABLE:
        assert not mistake.schema
        return
    document = parse_document(mistake.text).data
    assert Checker(policy_schema(catalog)).valid(document) is not mistake.schema
