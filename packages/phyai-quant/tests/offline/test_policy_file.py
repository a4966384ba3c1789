import json
import sys

import pytest

from phyai_quant import QuantConfigError
from phyai_quant.offline.policy_file import read_any_plan, read_policy
from phyai_quant.plan_io import dump_plan

POLICY = """\
schema: phyai.kernel/v1
rules:
  - id: other
quantization:
  rules:
    - match: {glob: "*.mlp.*"}
      weight: {dtype: int8}
    - match: {name: lm_head}
      scheme: null
"""


def test_the_section_of_a_kernel_policy(tmp_path):
    file = tmp_path / "policy.yaml"
    file.write_text(POLICY)
    plan = read_policy(file)
    assert plan.resolve("a.mlp.b").weight.dtype == "int8"
    assert plan.resolve("lm_head") is None
    assert len(plan.rules) == 2
    file.write_text(json.dumps({"quantization": {"default": {"weight": {"dtype": "int8"}}}}))
    assert read_policy(file).default.weight.dtype == "int8"


def test_a_missing_yaml_reader_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ruamel.yaml", None)
    (tmp_path / "policy.yaml").write_text(POLICY)
    with pytest.raises(QuantConfigError, match=r'pip install "phyai-quant\[cli\]"'):
        read_policy(tmp_path / "policy.yaml")


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_plan_files_read_back_equal(tmp_path, suffix):
    (tmp_path / "policy.yaml").write_text(POLICY)
    plan = read_policy(tmp_path / "policy.yaml")
    file = tmp_path / f"plan.{suffix}"
    dump_plan(plan, file)
    assert read_any_plan(file) == plan


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (POLICY.replace("int8", "int9"), r"policy\.yaml:7: .*dtype.*'int9' is not allowed"),
        (POLICY.replace("glob", "glib"), r"policy\.yaml:6: .*unknown key"),
        (POLICY.replace("quantization:", "quantisation:"), "has no section 'quantization'"),
        ("quantization:\n", "has no section 'quantization'"),
        ("quantization: [1]\n", "expected a mapping"),
        ("[]\n", "expected a mapping, got"),
        ("", "expected a mapping, got NoneType"),
        ("a: 1\na: 2\n", "is no valid YAML"),
        ("a: [1\n", "is no valid YAML"),
        ("[" * 500, "is no valid YAML"),
    ],
)
def test_faults_name_file_and_line(tmp_path, text, message):
    file = tmp_path / "policy.yaml"
    file.write_text(text)
    with pytest.raises(QuantConfigError, match=message):
        read_policy(file)


def test_unreadable_files(tmp_path):
    with pytest.raises(QuantConfigError, match=r"absent\.yaml: cannot be read"):
        read_policy(tmp_path / "absent.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff")
    with pytest.raises(QuantConfigError, match="cannot be read"):
        read_policy(tmp_path / "latin.yaml")


def test_plans_of_checkpoints(tmp_path):
    config = {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_any_plan(tmp_path) == read_any_plan(tmp_path / "config.json")
    assert read_any_plan(tmp_path).default.weight.dtype == "fp8_e4m3"
    (tmp_path / "config.json").write_text("{}")
    assert read_any_plan(tmp_path) is None
