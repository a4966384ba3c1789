"""The JSON Schema of policies: it takes every shipped policy and refuses what is misspelt."""

import json
import re
import runpy
from pathlib import Path

import pytest

from phyai.dispatch import PolicyError, policy_from_mapping
from phyai.dispatch.policy_schema import DIALECT, policy_schema
from phyai.dispatch.policy_yaml import parse_document, read_document
from phyai_quant.policy_section import parse_quantization_section
from phyai_quant.scheme import Granularity, QDType, QuantConfigError

ROOT = Path(__file__).parents[4]
Checker = runpy.run_path(str(Path(__file__).with_name("json_schema.py")))["Checker"]
SHIPPED = sorted((ROOT / "examples").glob("*/kernel_polic*/*.yaml")) + sorted(
    (ROOT / "examples").glob("*/kernel_policy.yaml")
)


@pytest.fixture(scope="module")
def schema(catalog):
    return policy_schema(catalog)


@pytest.fixture(scope="module")
def checker(schema):
    return Checker(schema)


def valid(checker, text):
    return checker.valid(parse_document(text).data)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.parent.name}-{path.stem}")
def test_shipped_policies_are_valid(checker, path):
    assert checker.valid(read_document(path).data)


def test_there_are_shipped_policies():
    assert len(SHIPPED) >= 33


def test_the_schema_is_plain_json_with_its_dialect_and_no_dangling_reference(schema):
    text = json.dumps(schema, sort_keys=True)
    assert json.loads(text)["$schema"] == DIALECT
    references = set(re.findall(r'"#/\$defs/([^"]+)"', text))
    assert references <= set(schema["$defs"])
    assert set(schema["$defs"]) - references == set()


def test_the_reference_validator_agrees_when_it_is_installed(schema, checker):
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    documents = [read_document(path).data for path in SHIPPED]
    documents += [parse_document(text).data for text in (*VALID, *INVALID)]
    for document in documents:
        assert validator.is_valid(document) is checker.valid(document)


def test_operations_ids_and_facts_are_enumerated(schema, catalog):
    definitions = schema["$defs"]
    assert definitions["kernel_id"]["enum"] == sorted(catalog.match_ids("*"))
    match = definitions["match"]
    assert match["properties"]["op"]["anyOf"][0]["enum"] == list(catalog.ops())
    for op in catalog.ops():
        assert set(catalog.entry(op).kinds) <= set(match["properties"])


VALID = [
    "",
    "{}",
    "schema: 1\nrules: null\n",
    "rules: [{prefer: [torch.gemm.bf16, flashinfer.gemm.bf16], match: null}]",
    "rules: [{restrict_to: 'torch.*', match: {op: gemm, shape: {M: '<=8'}, dtype.input: bf16}}]",
    "rules: [{restrict_to: '*', match: {device: {arch: ['sm90', sm100]}, model.tags: fast}}]",
    "rules: [{restrict_to: '*', match: {device.arch: '>=sm80', lib.humming: yes}}]",
    "rules: [{restrict_to: '*', match: {quant: {fields: {activation: a16}, block_k: '%16==0'}}}]",
    "rules: [{restrict_to: '*', match: {when: {if: {role: a}, then: {role: [b, null]}}}}]",
    "rules: [{restrict_to: '*', match: {any_of: [{role: a}, {none_of: [{op: rope}]}]}}]",
    "rules: [{prefer: humming.gemm.w4a16, params: {compute_config: {use_f16_accum: true}}}]",
    "overrides: [{use: torch.gemm.bf16, restrict_to: null, priority: -1}]",
    "quantization: {rules: [{match: {name: a}, scheme: null}]}",
    "quantization: {default: {weight: {dtype: int8, rotation_group: 64}, input: {dtype: int8}}}",
    "quantization: {default: {weight: {dtype: int8}, stored_by: mine}}",
]
INVALID = [
    "[]",
    "rulez: []",
    "schema: v2",
    "profile: off",
    "defaults: {fallbak: error}",
    "rules: {a: 1}",
    "rules: [{}]",
    "rules: [{prefer: torch.gemm.bf16, restrict_to: '*'}]",
    "rules: [{use: torch.gemm.bf16}]",
    "rules: [{prefer: torch.gemm.bf61}]",
    "rules: [{restrict_to: torch.gemm}]",
    "rules: [{prefer: torch.gemm.bf16, priority: high}]",
    "rules: [{prefer: torch.gemm.bf16, priority: true}]",
    "rules: [{prefer: [torch.gemm.bf16, torch.gemm.bf16]}]",
    "rules: [{prefer: torch.gemm.bf16, params: {speed: 1}}]",
    "rules: [{restrict_to: '*', match: {op: gem}}]",
    "rules: [{restrict_to: '*', match: {op: gemm, attrs.causal: true}}]",
    "rules: [{restrict_to: '*', match: {op: gemm, shape: {m: 1}}}]",
    "rules: [{restrict_to: '*', match: {shape.Q: 1}}]",
    "rules: [{restrict_to: '*', match: {shape.M: many}}]",
    "rules: [{restrict_to: '*', match: {shape.M: '%0'}}]",
    "rules: [{restrict_to: '*', match: {shape.M: []}}]",
    "rules: [{restrict_to: '*', match: {role: 'exp*'}}]",
    "rules: [{restrict_to: '*', match: {device.arch: 90}}]",
    "rules: [{restrict_to: '*', match: {device.arch: sm9}}]",
    "rules: [{restrict_to: '*', match: {device: {vendor: nvida}}}]",
    "rules: [{restrict_to: '*', match: {any_of: []}}]",
    "rules: [{restrict_to: '*', match: {when: {if: {role: a}}}}]",
    "overrides: [{prefer: torch.gemm.bf16}]",
    "overrides: [{use: torch.gemm.bf16, fallback: error}]",
    "quantization: {method: gptq}",
    "quantization: {rules: [{match: {name: a, glob: b}, scheme: null}]}",
    "quantization: {rules: [{match: {name: a}, scheme: null, weight: {dtype: int8}}]}",
    "quantization: {rules: [{match: {name: a}, scheme: null, stored_by: mine}]}",
    "quantization: {rules: [{match: {name: a}, weight: {dtype: int8}, stored_by: ''}]}",
    "quantization: {rules: [{match: {name: a}, weight: {dtype: bf16}}]}",
    "quantization: {rules: [{match: {name: a}, weight: {dtype: int4, block_shape: [128]}}]}",
    "quantization: {rules: [{match: {name: a}, weight: {dtype: int8, symmetric: false}}]}",
    "quantization: {rules: [{match: {name: a}, weight: {dtype: int8, micro_scaled: true}}]}",
    "quantization: {rules: [{match: {name: a}, weight: {dtype: int8, rotation_group: 32}}]}",
]


@pytest.mark.parametrize("text", VALID)
def test_what_the_loader_takes_is_valid(checker, catalog, text):
    policy_from_mapping(parse_document(text).data, catalog=catalog)
    assert valid(checker, text)


@pytest.mark.parametrize("text", INVALID)
def test_what_the_schema_refuses_the_loader_refuses(checker, catalog, text):
    with pytest.raises(PolicyError):
        policy_from_mapping(parse_document(text).data, catalog=catalog)
    assert not valid(checker, text)


def test_the_formats_of_inputs_and_weights_are_those_of_the_parser(schema):
    def parses(role, dtype):
        tensors = {"weight": {"dtype": "int4"}, role: {"dtype": dtype.value}}
        try:
            parse_quantization_section({"default": tensors})
        except QuantConfigError as error:
            return f"{role}.dtype: '{dtype.value}' is not" not in str(error)
        return True

    for role in ("weight", "input"):
        formats = schema["$defs"][f"quantized_{role}"]["properties"]["dtype"]["enum"]
        assert {dtype.value for dtype in QDType if parses(role, dtype)} == set(formats)


def test_granularities_of_conditions_are_those_of_weights(schema):
    values = schema["$defs"]["condition_quant.granularity"]["anyOf"][0]["enum"]
    assert set(values) == set(Granularity)
