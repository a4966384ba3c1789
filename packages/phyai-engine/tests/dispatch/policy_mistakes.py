"""30 mistakes in kernel policies: what each looks like, and the message it gets.

``python packages/phyai-engine/tests/dispatch/policy_mistakes.py`` writes docs/policy-mistakes.md.
"""

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from phyai.dispatch import PolicyError, build_catalog, load_policy

CATALOG = build_catalog()
PAGE = Path(__file__).resolve().parents[4] / "docs" / "policy-mistakes.md"
INTRODUCTION = """\
# Mistakes in kernel policies, and what is said about them

Every message starts with the file and the line (here `policy.yaml:LINE: `), then names the place
in the document, the value seen and what may stand there; lists of known names are cut here.
`phyai policy check FILE` reports the first one; an engine refuses the file with the same text. A
test compares the messages below with those of the loader.

| # | mistake | lines of the policy | line | message |
| --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    Attributes:
        title: What is wrong.
        line: Line that the message must name.
        text: The policy.
        schema: Whether the JSON Schema refuses it too.
    """

    title: str
    line: int
    text: str
    schema: bool = True

    def message(self, folder: Path) -> tuple[int | None, str]:
        """Returns the line and the rest of the message that the loader gives the policy."""
        path = folder / "policy.yaml"
        path.write_text(self.text, encoding="utf-8")
        try:
            load_policy(path, catalog=CATALOG)
        except PolicyError as error:
            return error.line, str(error).removeprefix(f"{path}:{error.line}: ")
        raise AssertionError(f"{self.title}: this policy loads:\n{self.text}")


def rule(body: str) -> str:
    """Returns a policy with one rule."""
    return f"rules:\n  - {body}\n"


def where(match: str) -> str:
    """Returns a policy with one rule for gemm and one more condition."""
    return rule(f"{{match: {{op: gemm, {match}}}, restrict_to: torch.gemm.*}}")


def scheme(body: str) -> str:
    """Returns a policy with one quantization rule."""
    return f"quantization:\n  rules:\n    - match: {{glob: '*.mlp.*'}}\n      {body}\n"


MISTAKES: list[Mistake] = [
    Mistake("a misspelt section", 2, "profile: static\nrulez: []\n"),
    Mistake("a key written twice", 3, "rules:\n  - priority: 10\n    priority: 1\n", False),
    Mistake("an unquoted word for a profile", 1, "profile: off\n"),
    Mistake("a newer schema", 1, "schema: phyai.kernel/v2\n"),
    Mistake("broken YAML", 2, "rules:\n  - {match: ]\n", False),
    Mistake("a date where text belongs", 2, rule("{id: 2026-01-01, prefer: torch.rmsnorm}"), False),
    Mistake("a merge key", 2, "rules:\n  - <<: {priority: 1}\n", False),
    Mistake("a misspelt default", 2, "defaults:\n  fallbak: error\n"),
    Mistake("a misspelt implementation", 2, rule("prefer: torch.rmsnrom")),
    Mistake("a pattern that matches nothing", 2, rule('restrict_to: "flashinfr.*"'), False),
    Mistake("neither prefer nor restrict_to", 2, rule("match: {op: gemm}")),
    Mistake("a pin among the rules", 2, rule("use: torch.rmsnorm")),
    Mistake("a soft choice among the overrides", 2, "overrides:\n  - prefer: torch.rmsnorm\n"),
    Mistake(
        "two rules of one name",
        3,
        rule("{id: a, prefer: torch.rmsnorm}") + "  - {id: A, prefer: torch.layernorm}\n",
        False,
    ),
    Mistake("a priority in words", 2, rule("{prefer: torch.rmsnorm, priority: high}")),
    Mistake(
        "rows of another operation",
        2,
        rule("{match: {op: rmsnorm}, prefer: torch.gemm.bf16}"),
        False,
    ),
    Mistake(
        "an option the rows do not have", 2, rule("{prefer: torch.rmsnorm, params: {size: 1}}")
    ),
    Mistake(
        "a wrong value of an option",
        2,
        rule("{prefer: humming.gemm.w4a16, params: {compute_config: {use_f16_accum: maybe}}}"),
        False,
    ),
    Mistake(
        "two rules that match the same call",
        3,
        rule("{id: small, match: {op: gemm, shape.M: '<8'}, restrict_to: torch.gemm.*}")
        + "  - {id: expert, match: {op: gemm, role: expert}, restrict_to: flashinfer.gemm.*}\n",
        False,
    ),
    Mistake(
        "a rule that another one covers",
        3,
        rule("{id: all, match: {op: gemm}, restrict_to: torch.gemm.*}")
        + "  - {id: one, match: {op: gemm, role: expert}, restrict_to: flashinfer.gemm.*}\n",
        False,
    ),
    Mistake("a misspelt operation", 2, rule("{match: {op: gem}, restrict_to: torch.gemm.*}")),
    Mistake("a fact in the wrong case", 2, where("shape.m: 4")),
    Mistake("a fact of another operation", 2, where("attrs.causal: true")),
    Mistake("a pattern in a condition", 2, where("role: 'exp*'")),
    Mistake("a product instead of an architecture", 2, where("device.arch: h200")),
    Mistake("an unknown vendor", 2, where("device.vendor: nvida")),
    Mistake("text where a number belongs", 2, where("shape.M: few")),
    Mistake("a misspelt weight format", 4, scheme("weight: {dtype: int44}")),
    Mistake(
        "a group size of the wrong shape", 4, scheme("weight: {dtype: int4, block_shape: [128]}")
    ),
    Mistake(
        "weight and input that nothing runs",
        5,
        scheme("weight: {dtype: int8}\n      input: {dtype: fp8_e4m3}"),
        False,
    ),
]


def page(folder: Path) -> str:
    """Returns the page, with the messages of this loader."""
    rows = []
    for number, mistake in enumerate(MISTAKES, 1):
        line, message = mistake.message(folder)
        message = re.sub(r"\(known: [^)]*\)", "(known: ...)", message)
        shown = "<br>".join(code(part) for part in mistake.text.splitlines())
        rows.append(f"| {number} | {mistake.title} | {shown} | {line} | {code(message)} |\n")
    return INTRODUCTION + "".join(rows)


def code(text: str) -> str:
    """Returns text as code in a table cell, with its indentation."""
    indent = len(text) - len(text.lstrip(" "))
    return "&nbsp;" * indent + f"`{text.strip().replace('|', chr(92) + '|')}`"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        PAGE.write_text(page(Path(scratch)), encoding="utf-8")
