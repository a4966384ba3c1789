"""Runs what the READMEs and the docs show.

Every ``sh`` and ``python`` block is executed: shell blocks from the repository root with the
environment's commands on PATH, Python blocks in an empty folder. A block may opt out with an HTML
comment on the line above its fence that says why: ``<!-- not run: needs a robot -->``.
"""

import os
import re
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SECONDS_ALLOWED = 1200  # ends what hangs, also on a busy machine
FENCE = re.compile(
    r"(?:<!-- (?P<remark>[^\n]*?) ?-->\n)?"
    r"^(?P<indent> *)```(?P<language>\w+)\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
REASON = re.compile(r"not run: \S.{4,}")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page: its language, its text and the remark above it."""

    page: str
    line: int
    language: str
    text: str
    remark: str | None

    @property
    def reason_not_run(self) -> str | None:
        """The reason of a ``not run`` remark, or None when the block must run."""
        if self.remark and self.remark.startswith("not run"):
            return self.remark
        return None


def blocks_of(page: str, text: str) -> list[Block]:
    """Return the fenced blocks of one Markdown text."""
    return [
        Block(
            page,
            text.count("\n", 0, match.start("text")) + 1,
            match["language"],
            match["text"],
            match["remark"],
        )
        for match in FENCE.finditer(text)
    ]


def pages() -> list[Path]:
    """Every README of the repository, its contributor guides and the pages of docs/."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    for folder in ("packages", "examples", "scripts", "tests"):
        found += (ROOT / folder).rglob("README.md")
    return sorted(page for page in found if not {".venv", ".cache"} & set(page.parts))


BLOCKS = [
    block
    for page in pages()
    for block in blocks_of(str(page.relative_to(ROOT)), page.read_text(encoding="utf-8"))
]
RUNNABLE = [block for block in BLOCKS if block.language in {"sh", "python"}]
# What several pages show is run once.
EXECUTED = list(
    {
        (block.language, block.text): block
        for block in reversed(RUNNABLE)
        if block.reason_not_run is None
    }.values()
)


def run_block(block: Block, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run one block to its end and return what it printed."""
    scripts = sysconfig.get_path("scripts")
    environment = os.environ | {
        "PATH": scripts + os.pathsep + os.environ["PATH"],
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
    }
    command = ["sh", "-eu", "-c"] if block.language == "sh" else [sys.executable, "-c"]
    return subprocess.run(
        [*command, block.text],
        cwd=ROOT if block.language == "sh" else folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS_ALLOWED,
        check=False,
    )


@pytest.mark.parametrize("block", EXECUTED, ids=lambda block: f"{block.page}:{block.line}")
def test_block_runs(block: Block, tmp_path: Path):
    result = run_block(block, tmp_path)
    assert result.returncode == 0, f"{block.text}\n{result.stdout}\n{result.stderr}"


@pytest.mark.parametrize("block", RUNNABLE, ids=lambda block: f"{block.page}:{block.line}")
def test_a_block_that_is_not_run_says_why(block: Block):
    assert block.reason_not_run is None or REASON.fullmatch(block.reason_not_run)


def test_shell_blocks_are_marked_as_sh():
    other = [b for b in BLOCKS if b.language in {"bash", "shell", "console", "zsh", "py"}]
    assert [f"{b.page}:{b.line} is marked as {b.language}" for b in other] == []


def test_root_readme_shows_the_two_commands():
    shown = [b.text for b in RUNNABLE if b.page == "README.md" and b.language == "sh"]
    assert "scripts/demo\n" in "".join(shown)
    assert "scripts/test\n" in "".join(shown)


SAMPLE = """
```sh
echo "first"
```

<!-- not run: needs a robot -->
```sh
false
```

<!-- a remark about the page -->
```python
assert 1 + 1 == 3
```
"""


def test_blocks_are_found_with_their_lines_and_remarks():
    first, second, third = blocks_of("page.md", SAMPLE)
    assert (first.language, first.text, first.line) == ("sh", 'echo "first"\n', 3)
    assert first.reason_not_run is None
    assert second.reason_not_run == "not run: needs a robot"
    assert third.reason_not_run is None


def test_a_failing_block_is_reported(tmp_path: Path):
    *_, wrong = blocks_of("page.md", SAMPLE)
    assert run_block(wrong, tmp_path).returncode != 0


def test_a_failure_in_the_middle_of_a_shell_block_is_reported(tmp_path: Path):
    (block,) = blocks_of("page.md", "```sh\nfalse\ntrue\n```\n")
    assert run_block(block, tmp_path).returncode != 0


@pytest.mark.parametrize("remark", ["not run", "not run:", "not run: x"])
def test_opting_out_needs_a_reason(remark: str):
    assert not REASON.fullmatch(remark)
