"""The outputs that docs/dispatch.md shows are what its commands print.

A line of dots stands for lines left out; spaces are not counted, because columns depend on names.
"""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from phyai.cli import main

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "dispatch.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"```sh\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)
LEFT_OUT = "..."


def squeezed(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def first_difference(shown: list[str], printed: list[str]) -> str | None:
    """Return the first shown line that is not printed where it should be, or None."""
    position, free = 0, False
    for line in shown:
        if line == LEFT_OUT:
            free = True
            continue
        last = len(printed) if free else position + 1
        matches = [
            at for at in range(position, last) if printed[at : at + 1] and starts(printed[at], line)
        ]
        if not matches:
            return line
        position, free = matches[0] + 1, False
    return None if free or position == len(printed) else printed[position]


def starts(printed: str, line: str) -> bool:
    """Whether a printed line is the shown one; a refused row may be shown without its reason."""
    return printed == line or (line.startswith("rejected ") and printed.startswith(f"{line} "))


@pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="the page shows rows of FlashInfer"
)
@pytest.mark.parametrize(("command", "output"), SHOWN, ids=["rule", "no-rule", "model"])
def test_a_shown_output_is_what_the_command_prints(
    command: str, output: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(ROOT)
    for name in ("PHYAI_KERNEL_CONFIG", "PHYAI_KERNEL_PROFILE", "PHYAI_PARAMS_DTYPE"):
        monkeypatch.delenv(name, raising=False)
    program, *arguments = shlex.split(command.replace("\\\n", " "))
    assert program == "phyai"
    assert main(arguments) == 0
    printed = squeezed(capsys.readouterr().out)
    difference = first_difference(squeezed(output), printed)
    assert difference is None, f"{difference}\n\nprinted:\n" + "\n".join(printed)


def test_the_page_shows_outputs():
    assert len(SHOWN) == 3


@pytest.mark.parametrize(
    ("shown", "printed", "difference"),
    [
        (["a", "b"], ["a", "b"], None),
        (["a", "..."], ["a", "b"], None),
        (["a", "...", "c"], ["a", "b", "c"], None),
        (["a", "c"], ["a", "b", "c"], "c"),
        (["a"], ["a", "b"], "b"),
        (["...", "x"], ["a", "b"], "x"),
        (["rejected row"], ["rejected row because"], None),
        (["chosen row"], ["chosen row because"], "chosen row"),
    ],
)
def test_a_wrong_output_would_be_noticed(
    shown: list[str], printed: list[str], difference: str | None
):
    assert first_difference(shown, printed) == difference
