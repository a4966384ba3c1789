"""docs/cli.md has a section for every command of ``phyai``, and for none that is gone."""

import re
from collections.abc import Iterator
from pathlib import Path

import typer.main

from phyai.cli.app import app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"


def commands(command: object, path: str) -> Iterator[str]:
    """Yield the full name of every command below ``command`` that does something itself."""
    below = getattr(command, "commands", {})
    if not below:
        yield path
    for name, child in below.items():
        yield from commands(child, f"{path} {name}")


def test_every_command_has_its_section_and_no_section_is_stale():
    headings = re.findall(r"^## .*$", PAGE.read_text(), re.MULTILINE)
    # A heading may name several commands; arguments follow a command in capitals.
    shown = [
        name for line in headings for name in re.findall(r"`(phyai [a-z0-9 -]*[a-z0-9])", line)
    ]
    assert sorted(shown) == sorted(commands(typer.main.get_command(app), "phyai"))
