"""Options that are declared once as a dataclass are options of each command that takes it."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from phyai.cli.option_groups import with_groups

Word = Annotated[str, typer.Option(help="A word.")]
Count = Annotated[int | None, typer.Option("--count", "-n", help="A count.", min=1)]
After = Annotated[int, typer.Option(help="A delay.")]


@dataclass(frozen=True)
class Text:
    word: Word
    count: Count = None


@dataclass(frozen=True)
class Style:
    loud: Annotated[bool, typer.Option("--loud", help="Shout.")] = False


@pytest.fixture
def app():
    seen = []

    @with_groups
    def say(first: Word, text: Text, after: After = 7, *, style: Style) -> None:
        """Say it."""
        seen.append((first, text, after, style))

    app = typer.Typer(add_completion=False)
    app.command()(say)
    app.seen = seen
    return app


def run(app, *words):
    return CliRunner().invoke(app, words)


def test_a_command_gets_its_groups_as_values(app):
    assert run(app, "--first", "a", "--word", "b", "--count", "2", "--loud").exit_code == 0
    assert app.seen == [("a", Text("b", 2), 7, Style(loud=True))]


def test_defaults_are_those_of_the_group(app):
    assert run(app, "--first", "a", "--word", "b").exit_code == 0
    assert app.seen == [("a", Text("b"), 7, Style())]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--first", "a"), "--word"),
        (("--first", "a", "--word", "b", "-n", "0"), "-n"),
        (("--first", "a", "--word", "b", "--text", "c"), "--text"),
    ],
)
def test_a_missing_or_wrong_option_of_a_group_is_a_usage_error(app, words, said):
    result = run(app, *words)
    assert result.exit_code == 2
    assert said in result.output
    assert app.seen == []


def test_help_lists_options_where_the_group_stands(app):
    text = run(app, "--help").output
    places = [text.index(name) for name in ("--first", "--word", "--after", "--loud")]
    assert places == sorted(places)
    assert "Say it." in text
