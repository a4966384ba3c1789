"""JSON, tables and progress of the command line."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from phyai.cli.output import (
    display_path,
    make_progress,
    make_table,
    plain,
    print_json,
    print_pairs,
    print_table,
    status_line,
    stdout_to_stderr,
)


def test_plain_turns_everything_into_json_types():
    document = {
        "array": np.arange(4, dtype=np.float32).reshape(2, 2),
        "scalar": np.float32(0.5),
        "set": frozenset({"b", "a"}),
        "path": Path("a/b"),
        "tuple": (1, True, None),
        3: "key",
        "nan": math.nan,
        "infinite": np.array([np.inf, 1.0]),
        "bytes": b"x",
    }
    assert plain(document) == {
        "array": [[0.0, 1.0], [2.0, 3.0]],
        "scalar": 0.5,
        "set": ["a", "b"],
        "path": "a/b",
        "tuple": [1, True, None],
        "3": "key",
        "nan": None,
        "infinite": [None, 1.0],
        "bytes": "b'x'",
    }


def test_print_json_writes_one_document(capsys):
    print_json({"π": [math.nan]})
    out = capsys.readouterr().out
    assert json.loads(out) == {"π": [None]}
    assert "π" in out
    assert out.endswith("}\n")


def test_prints_of_libraries_go_to_stderr(capsys):
    with stdout_to_stderr():
        print("noise")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "noise\n")


@pytest.mark.parametrize("columns", [1, 7, 32])
def test_a_table_never_cuts_a_number(capsys, columns):
    table = make_table("step", *(f"a{i}" for i in range(columns)), numbers=True)
    values = [f"{-1000.5 - i:.4f}" for i in range(columns)]
    table.add_row("0", *values)
    print_table(table)
    header, _, row = capsys.readouterr().out.splitlines()
    assert row.split() == ["0", *values]
    assert header.split() == ["step", *(f"a{i}" for i in range(columns))]


def test_long_text_wraps_and_markup_is_left_alone(capsys):
    table = make_table("name", "reason")
    table.add_row("[red]x[/red]", "word " * 60)
    print_table(table)
    lines = capsys.readouterr().out.splitlines()
    assert "[red]x[/red]" in lines[2]
    assert max(map(len, lines)) <= 100
    assert sum(line.count("word") for line in lines) == 60


def test_pairs_are_aligned(capsys):
    print_pairs([("a", 1), ("long", "x")])
    assert capsys.readouterr().out == "a     1\nlong  x\n"
    print_pairs([])
    assert capsys.readouterr().out == ""


def test_progress_is_silent_without_a_terminal(capsys):
    with make_progress() as progress, status_line("Loading"):
        progress.advance(progress.add_task("episodes", total=3))
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_progress_goes_to_stderr_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with make_progress() as progress:
        progress.advance(progress.add_task("episodes", total=3))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "episodes" in captured.err


def test_paths_below_the_current_folder_are_short(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert display_path(tmp_path / "a" / "b.png") == "a/b.png"
    assert display_path(Path("/")) == "/"
