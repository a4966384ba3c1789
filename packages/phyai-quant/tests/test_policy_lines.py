"""Errors of a policy's quantization section point at the line of a YAML file."""

import pytest
from ruamel.yaml import YAML

from phyai_quant import QuantConfigError
from phyai_quant.policy_section import parse_quantization_section

POLICY = """\
version: phyai.kernel/v1
quantization:
  method: rtn
  default: null
  rules:
    - match: {name: lm_head}
      scheme: null

    - id: mlp
      match:
        glob: "*.mlp.*"
      weight:
        dtype: int8
        granularity: per_channel
        rotation_group: 64
      input:
        dtype: int8
        dynamic: true
"""


def line_of(document):
    """Lines of key paths below ``quantization``, from the loader's own marks."""

    def line(path):
        node = document["quantization"]
        for key in path[:-1]:
            node = node[key]
        try:
            mark = node.lc.item(path[-1]) if isinstance(path[-1], int) else node.lc.key(path[-1])
        except KeyError:
            return node.lc.line + 1
        return mark[0] + 1

    return line


@pytest.mark.parametrize(
    ("old", "new", "place", "text"),
    [
        ("method: rtn", "method: gptq", "3: quantization.method", "'gptq' is not allowed"),
        ("default: null", "default: int8", "4: quantization.default", "expected a mapping"),
        ("{name: lm_head}", "{nam: lm_head}", "6: quantization.rules[0].match.nam", "did you mean"),
        ("scheme: null", "scheme: int8", "7: quantization.rules[0].scheme", "allowed: null"),
        ('glob: "*.mlp.*"', 'regex: "("', "11: quantization.rules[1].match.regex", "invalid reg"),
        ("rotation_group: 64", "rotation_group: 32", "15: quantization.rules[1].weight", "16, 64"),
        (
            "        dtype: int8\n        dynamic",
            "        dtype: fp8_e5m2\n        dynamic",
            "17: quantization.rules[1].input.dtype (rule 'mlp')",
            "input.dtype is fp8_e5m2",
        ),
        (
            "dynamic: true",
            "dynamic: 'on'",
            "18: quantization.rules[1].input.dynamic",
            "'on' is not",
        ),
    ],
)
def test_errors_name_the_line(old, new, place, text):
    changed = POLICY.replace(old, new)
    assert changed != POLICY
    document = YAML().load(changed)
    with pytest.raises(QuantConfigError) as error:
        parse_quantization_section(
            document["quantization"], source="p.yaml", line_of=line_of(document)
        )
    assert str(error.value).startswith(f"p.yaml:{place}")
    assert text in str(error.value)


def test_the_policy_itself_is_read():
    plan = parse_quantization_section(YAML().load(POLICY)["quantization"], source="p.yaml")
    assert plan.resolve("lm_head") is None
    assert plan.resolve("a.mlp.up_proj").weight.rotation_group == 64
    assert plan.source == "p.yaml"
