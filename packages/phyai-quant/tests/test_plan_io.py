import json

import pytest

from phyai_quant import Matcher, QuantConfigError, QuantPlan, QuantScheme, Rule, TensorQuant
from phyai_quant.plan_io import VERSION, dump_plan, load_plan, plan_from_dict, plan_to_dict

TOKEN = TensorQuant("int8", "per_channel", dynamic=True)
SCHEMES = [
    QuantScheme(TensorQuant("fp8_e4m3", "per_tensor"), TensorQuant("fp8_e4m3", "per_tensor")),
    QuantScheme(TensorQuant("int4", "block", symmetric=False, block_shape=(1, 128))),
    QuantScheme(TensorQuant("int4", "block", block_shape=(1, 64), act_order=True)),
    QuantScheme(TensorQuant("int8", "per_channel", rotation_group=64), TOKEN, online=True),
    QuantScheme(TensorQuant("nvfp4", "block", micro_scaled=True, block_shape=(1, 16))),
]
PLAN = QuantPlan(
    rules=(
        Rule(Matcher("name", "a.on"), None, 'c.json: ignore: "a.on"'),
        Rule(Matcher("regex", r".*\.(q|k)_proj$"), SCHEMES[0], "π: 'x'\n- y"),
        Rule(Matcher("glob", "*.mlp.*"), SCHEMES[1]),
        Rule(Matcher("module_cls", "Linear"), SCHEMES[2]),
        Rule(Matcher("name", "yes"), SCHEMES[4]),
    ),
    default=SCHEMES[3],
    kv_cache=TensorQuant("fp8_e4m3", "per_tensor"),
    source="config.json: quantization_config",
)


def same(left, right):
    sources = [
        (rule.source, other.source) for rule, other in zip(left.rules, right.rules, strict=False)
    ]
    agree = all(ours == theirs for ours, theirs in sources)
    return left == right and left.source == right.source and agree


@pytest.mark.parametrize("plan", [PLAN, QuantPlan(), QuantPlan(default=SCHEMES[0])])
@pytest.mark.parametrize("name", ["plan.json", "plan.yaml", "plan.yml"])
def test_files_read_back_equal(tmp_path, plan, name):
    text = dump_plan(plan, tmp_path / name)
    assert (tmp_path / name).read_text(encoding="utf-8") == text
    assert text.startswith("{") is name.endswith("json")
    assert same(load_plan(tmp_path / name), plan)


def test_the_form_is_free():
    assert dump_plan(PLAN) == dump_plan(PLAN, form="json")
    assert dump_plan(PLAN, form="yaml").startswith("version: phyai.quant-plan/v1\nsource:")
    with pytest.raises(QuantConfigError, match="form 'toml' is not supported; allowed: json, yaml"):
        dump_plan(PLAN, form="toml")


def test_every_field_of_a_tensor_survives():
    data = plan_to_dict(PLAN)
    assert set(data["default"]["weight"]) == set(TensorQuant.__dataclass_fields__)
    assert same(plan_from_dict(json.loads(json.dumps(data))), PLAN)


def test_left_out_fields_take_their_defaults():
    tensor = {"dtype": "int8", "granularity": "per_channel"}
    data = {"version": VERSION, "default": {"weight": tensor}}
    assert plan_from_dict(data) == QuantPlan(default=QuantScheme(TensorQuant(**tensor)))


TENSOR = {"dtype": "int8", "granularity": "per_channel"}
RULE = {"match": {"name": "a"}, "scheme": None}


def weight(**changes):
    return {"version": VERSION, "default": {"weight": {**TENSOR, **changes}}}


def rules(*entries):
    return {"version": VERSION, "rules": list(entries)}


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ([], "p: expected a mapping, got list"),
        ({}, "p: version: None is not allowed; allowed: phyai.quant-plan/v1"),
        ({"version": "v2"}, "p: version: 'v2' is not allowed"),
        ({"version": VERSION, "rule": []}, "p: rule: unknown key; known: version, source, rules"),
        ({"version": VERSION, "rules": {"a": 1}}, "p: rules: expected a list, got {'a': 1}"),
        ({"version": VERSION, "source": 3}, "p: source: 3 is not allowed"),
        ({"version": VERSION, "rules": False}, "p: rules: expected a list, got False"),
        (rules(3), "p: rules[0]: expected an object, got 3"),
        (rules(RULE, {**RULE, "when": 1}), "p: rules[1].when: unknown key"),
        (rules({"match": {}, "scheme": None}), "p: rules[0].match: give exactly one of name, glob"),
        (rules({"scheme": None}), "p: rules[0].match: give exactly one"),
        (rules({"match": {"prefix": "a"}}), "p: rules[0].match.prefix: unknown key"),
        (rules({"match": {"name": ""}, "scheme": None}), "p: rules[0].match.name: matcher name"),
        (rules({"match": {"regex": "("}, "scheme": None}), "rules[0].match.regex: invalid regular"),
        (rules({"match": {"name": "a"}}), "p: rules[0].scheme: required key is missing"),
        (rules({**RULE, "scheme": {}}), "p: rules[0].scheme.weight: required key is missing"),
        (rules({**RULE, "scheme": {"w": 1}}), "p: rules[0].scheme.w: unknown key"),
        (rules({**RULE, "source": []}), "p: rules[0].source: [] is not allowed"),
        (weight(dtype=None), "p: default.weight.dtype: required key is missing"),
        (weight(dtype="int9"), "p: default.weight: dtype 'int9' is not supported"),
        (weight(symmetric="no"), "p: default.weight.symmetric: 'no' is not allowed; allowed: true"),
        (weight(rotation_group=1.5), "p: default.weight.rotation_group: 1.5 is not an integer"),
        (weight(block_shape=[1]), "p: default.weight.block_shape: [1] is not two positive"),
        (
            weight(block_shape=[1, 2]),
            "p: default.weight: granularity 'per_channel' and block_shape",
        ),
        (weight(bits=8), "p: default.weight.bits: unknown key"),
    ],
)
def test_bad_plans_name_file_and_key(data, text):
    with pytest.raises(QuantConfigError) as error:
        plan_from_dict(data, source="p")
    assert str(error.value).startswith(text) or text in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.json", b"{", "not a valid JSON file"),
        ("a.json", b'{"version": 1, "version": 2}', "key 'version' stands twice in one object"),
        ("a.json", b'{"version": NaN}', "NaN is not JSON"),
        ("a.yaml", b"a: [", "not a valid YAML file"),
        ("a.yaml", b"a: 1\na: 2", "not a valid YAML file"),
        ("a.yaml", b"[" * 3000, "not a valid YAML file"),
        ("a.yaml", b"", "expected a mapping, got NoneType"),
        ("a.json", b"\xff", "cannot be read"),
    ],
)
def test_unreadable_files_are_named(tmp_path, name, content, text):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(QuantConfigError) as error:
        load_plan(tmp_path / name)
    assert text in str(error.value)
    assert str(tmp_path / name) in str(error.value)
    with pytest.raises(QuantConfigError, match=r"missing\.json: cannot be read"):
        load_plan(tmp_path / "missing.json")
