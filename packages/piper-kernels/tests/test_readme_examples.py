"""Every Python example in the READMEs of the package runs, but those that say why not."""

import re
from pathlib import Path

import pytest

import piper_kernels

ROOT = Path(piper_kernels.__file__).parent
BLOCK = re.compile(r"(?<!-->\n)```python\n(.*?)```", re.DOTALL)
EXAMPLES = [
    pytest.param(code, id=f"{readme.parent.relative_to(ROOT)}-{index}")
    for readme in sorted(ROOT.rglob("README.md"))
    for index, code in enumerate(BLOCK.findall(readme.read_text()))
]


def test_examples_exist():
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize("code", EXAMPLES)
def test_example_runs(code):
    exec(compile(code, "README.md", "exec"), {})
