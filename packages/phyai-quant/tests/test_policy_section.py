import pytest

from phyai_quant import Matcher, QuantConfigError, QuantScheme, TensorQuant
from phyai_quant.policy_section import parse_quantization_section

INT4_G128 = {"dtype": "int4", "block_shape": [1, 128]}
FP8_BLOCK = {"block_shape": [128, 128]}


def rule(**scheme):
    return {"rules": [{"match": {"glob": "*"}, **scheme}]}


def token(dtype):
    return TensorQuant(dtype, "per_channel", dynamic=True)


def block(dtype, shape, *, micro=False):
    return TensorQuant(dtype, "block", block_shape=shape, micro_scaled=micro)


# the thirteen schemes that presets ship: weight, input, what they parse to
SHIPPED = {
    "w4a16": (INT4_G128, None, block("int4", (1, 128)), None),
    "w8a16": ({"dtype": "int8", "block_shape": [1, 128]}, None, block("int8", (1, 128)), None),
    "w4a8_int8": (INT4_G128, "int8", block("int4", (1, 128)), token("int8")),
    "w4a8_fp8_e4m3": (INT4_G128, "fp8_e4m3", block("int4", (1, 128)), token("fp8_e4m3")),
    "w8a8_int8": (
        {"dtype": "int8", "block_shape": [1, 128]},
        "int8",
        block("int8", (1, 128)),
        token("int8"),
    ),
    "fp8_e4m3_a16": ({"dtype": "fp8_e4m3"}, None, TensorQuant("fp8_e4m3", "per_channel"), None),
    "fp8_e4m3_a8": (
        {"dtype": "fp8_e4m3"},
        "fp8_e4m3",
        TensorQuant("fp8_e4m3", "per_channel"),
        token("fp8_e4m3"),
    ),
    "fp8_e4m3_block_a8": (
        {"dtype": "fp8_e4m3", **FP8_BLOCK},
        "fp8_e4m3",
        block("fp8_e4m3", (128, 128)),
        token("fp8_e4m3"),
    ),
    "fp8_e5m2_a16": ({"dtype": "fp8_e5m2"}, None, TensorQuant("fp8_e5m2", "per_channel"), None),
    "fp8_e5m2_a8": (
        {"dtype": "fp8_e5m2"},
        "fp8_e5m2",
        TensorQuant("fp8_e5m2", "per_channel"),
        token("fp8_e5m2"),
    ),
    "fp8_e5m2_block_a8": (
        {"dtype": "fp8_e5m2", **FP8_BLOCK},
        "fp8_e5m2",
        block("fp8_e5m2", (128, 128)),
        token("fp8_e5m2"),
    ),
    "mxfp4_a16": (
        {"dtype": "mxfp4", "block_shape": [1, 32], "micro_scaled": True},
        None,
        block("mxfp4", (1, 32), micro=True),
        None,
    ),
    "nvfp4_a16": ({"dtype": "nvfp4"}, None, block("nvfp4", (1, 16), micro=True), None),
}


@pytest.mark.parametrize("variant", SHIPPED)
def test_shipped_schemes_parse(variant):
    weight, act, expected_weight, expected_act = SHIPPED[variant]
    section = rule(weight=weight, **({} if act is None else {"input": {"dtype": act}}))
    plan = parse_quantization_section(section)
    assert plan.resolve("a.b") == QuantScheme(expected_weight, expected_act, online=True)


def test_convrot_parses():
    plan = parse_quantization_section(
        rule(
            weight={"dtype": "int8", "granularity": "per_channel", "rotation_group": 64},
            input={"dtype": "int8", "granularity": "per_channel", "dynamic": True},
        )
    )
    weight = TensorQuant("int8", "per_channel", rotation_group=64)
    assert plan.resolve("a") == QuantScheme(weight, token("int8"), online=True)


def test_absent_and_empty_sections():
    assert parse_quantization_section(None) is None
    empty = parse_quantization_section({})
    assert empty.rules == ()
    assert empty.default is None


@pytest.mark.parametrize("rotation", [None, 64])
def test_nvfp4_inputs_parse(rotation):
    rotated = {} if rotation is None else {"rotation_group": rotation}
    section = rule(weight={"dtype": "nvfp4", **rotated}, input={"dtype": "nvfp4"})
    micro = {"granularity": "block", "micro_scaled": True, "block_shape": (1, 16)}
    assert parse_quantization_section(section).resolve("a") == QuantScheme(
        TensorQuant("nvfp4", rotation_group=rotation, **micro),
        TensorQuant("nvfp4", dynamic=True, **micro),
        online=True,
    )


def test_rules_keep_their_order_and_kinds():
    section = {
        "method": "rtn",
        "stage": "load",
        "default": {"weight": INT4_G128},
        "rules": [
            {"match": {"name": "lm_head"}, "scheme": None},
            {"id": "mlp", "match": {"regex": r".*\.mlp\."}, "weight": {"dtype": "int8"}},
            {"match": {"module_cls": "Linear"}, "weight": {"dtype": "nvfp4"}, "input": None},
        ],
    }
    plan = parse_quantization_section(section, source="policy.yaml")
    assert [r.matcher for r in plan.rules] == [
        Matcher("name", "lm_head"),
        Matcher("regex", r".*\.mlp\."),
        Matcher("module_cls", "Linear"),
    ]
    assert [r.source for r in plan.rules] == [
        "quantization.rules[0]",
        "quantization.rules[1] 'mlp'",
        "quantization.rules[2]",
    ]
    assert plan.resolve("lm_head") is None
    assert plan.resolve("x").weight.dtype == "int4"
    assert plan.default.online


W = "quantization.rules[0].weight"
I = "quantization.rules[0].input"  # noqa: E741
BAD = [
    ([], "quantization: expected a mapping, got []"),
    ({"rule": []}, "quantization.rule: unknown key; allowed: method, stage, default, rules"),
    ({"rule": []}, "did you mean 'rules'?"),
    ({"method": "gptq"}, "quantization.method: 'gptq' is not allowed; allowed: rtn"),
    ({"method": None}, "quantization.method: None is not allowed"),
    ({"stage": "calibrate"}, "quantization.stage: 'calibrate' is not allowed; allowed: load"),
    ({"stage": True}, "quantization.stage: True is not allowed; allowed: load; write it in quotes"),
    ({"rules": None}, "quantization.rules: expected a list, got None"),
    ({"rules": {}}, "quantization.rules: expected a list, got {}"),
    ({"rules": ["x"]}, "quantization.rules[0]: expected a mapping, got 'x'"),
    ({"default": "int8"}, "quantization.default: expected a mapping, got 'int8'"),
    ({"default": {"match": {}}}, "quantization.default.match: unknown key"),
    ({"default": {"weight": {"dtype": "int9"}}}, "quantization.default.weight.dtype: 'int9'"),
    ({"rules": [{"scheme": None}]}, "rules[0].match: required key is missing; give exactly one"),
    ({"rules": [{"match": {}, "scheme": None}]}, "rules[0].match: has 0 keys; give exactly one"),
    (
        {"rules": [{"match": {"name": "a", "glob": "b"}, "scheme": None}]},
        "rules[0].match: has 2 keys; give exactly one of name, glob, regex, module_cls",
    ),
    ({"rules": [{"match": {"prefix": "a"}}]}, "rules[0].match.prefix: unknown key"),
    ({"rules": [{"match": "a"}]}, "rules[0].match: expected a mapping, got 'a'"),
    ({"rules": [{"match": {"name": ""}}]}, "match.name: '' is not a non-empty string"),
    ({"rules": [{"match": {"glob": 3}}]}, "match.glob: 3 is not a non-empty string"),
    ({"rules": [{"match": {"regex": "("}}]}, "match.regex: invalid regular expression '('"),
    ({"rules": [{"match": {"name": ".a"}}]}, "match.name: layer name '.a' has an empty segment"),
    ({"rules": [{"id": 3, "match": {"name": "a"}}]}, "rules[0].id: 3 is not a non-empty string"),
    (rule(), f"{W}: required key is missing; give a mapping, or 'scheme: null'"),
    (rule(weight=None), f"{W}: required key is missing"),
    (rule(scheme="int8"), "rules[0].scheme: 'int8' is not allowed; allowed: null"),
    (rule(scheme=None, weight=INT4_G128), f"{W}: cannot be combined with 'scheme: null'"),
    (rule(scheme=None, input={"dtype": "int8"}), f"{I}: cannot be combined"),
    (rule(weight="int8"), f"{W}: expected a mapping, got 'int8'"),
    (rule(weight={}), f"{W}.dtype: required key is missing; allowed: fp8_e4m3, fp8_e5m2, int8"),
    (rule(weight={"dtype": "bf16"}), f"{W}.dtype: 'bf16' is not a quantized dtype"),
    (rule(weight={"dtype": 8}), f"{W}.dtype: 8 is not allowed"),
    (rule(weight={"dtype": "int8", "bits": 8}), f"{W}.bits: unknown key; allowed: dtype,"),
    (rule(weight={"dtype": "int8", "granularity": "group"}), f"{W}.granularity: 'group' is not"),
    (
        rule(weight={"dtype": "int8", "granularity": "block"}),
        f"{W}.granularity: granularity 'block'",
    ),
    (
        rule(weight={**INT4_G128, "granularity": "per_channel"}),
        f"{W}.granularity: granularity 'per_channel' and block_shape (1, 128) contradict",
    ),
    (rule(weight={"dtype": "nvfp4", "granularity": "per_channel"}), f"{W}.granularity:"),
    (rule(weight={"dtype": "int4", "block_shape": 128}), f"{W}.block_shape: 128 is not a list"),
    (rule(weight={"dtype": "int4", "block_shape": [1]}), f"{W}.block_shape: [1] is not a list"),
    (rule(weight={"dtype": "int4", "block_shape": [0, 128]}), f"{W}.block_shape: [0, 128]"),
    (rule(weight={"dtype": "int4", "block_shape": [True, 128]}), f"{W}.block_shape: [True, 128]"),
    (rule(weight={"dtype": "int8", "symmetric": "yes"}), f"{W}.symmetric: 'yes' is not a boolean"),
    (
        rule(weight={"dtype": "int8", "symmetric": False}),
        f"{W}.symmetric: weight.symmetric is False",
    ),
    (rule(weight={"dtype": "int8", "dynamic": True}), f"{W}.dynamic: weight.dynamic is True"),
    (
        rule(weight={"dtype": "int8", "micro_scaled": True}),
        f"{W}.micro_scaled: weight.micro_scaled",
    ),
    (rule(weight={"dtype": "mxfp4", "micro_scaled": False}), "allowed: true for mxfp4"),
    (rule(weight={"dtype": "mxfp4", "block_shape": [1, 16]}), "allowed: [1, 32] for mxfp4"),
    (rule(weight={"dtype": "nvfp4", "block_shape": [1, 32]}), "allowed: [1, 16] for nvfp4"),
    (
        rule(weight={"dtype": "int4", "block_shape": [2, 128]}),
        "weight.block_shape[0] is 2; allowed: 1",
    ),
    (rule(weight={"dtype": "fp8_e4m3", "block_shape": [32, 128]}), "1 or a power of two from 64"),
    (rule(weight={"dtype": "int4", "block_shape": [1, 96]}), "a power of two from 16 with an unq"),
    (rule(weight={"dtype": "int4", "block_shape": [1, 8]}), "weight.block_shape[1] is 8"),
    (
        rule(weight={"dtype": "int8", "block_shape": [1, 16]}, input={"dtype": "int8"}),
        f"{W}.block_shape: weight.block_shape[1] is 16; allowed: a power of two from 32",
    ),
    (rule(weight={"dtype": "int8", "rotation_group": "64"}), f"{W}.rotation_group: '64' is not an"),
    (rule(weight={"dtype": "int8", "rotation_group": True}), f"{W}.rotation_group: True is not an"),
    (rule(weight={"dtype": "int8", "rotation_group": 32}), "rotation_group 32 is not supported"),
    (
        rule(weight={"dtype": "int4", "rotation_group": 64}),
        f"{W}.rotation_group: rotation_group 64",
    ),
    (
        rule(weight={"dtype": "int8", "rotation_group": 64}),
        f"{I}: input.dtype is None; allowed: int8 with weight.rotation_group 64",
    ),
    (
        rule(weight={"dtype": "int8", "rotation_group": 64}, input={"dtype": "fp8_e4m3"}),
        f"{I}.dtype: input.dtype is fp8_e4m3; allowed: int8",
    ),
    (rule(weight={"dtype": "int8"}, input={"dtype": "int4"}), f"{I}.dtype: 'int4' is not allowed"),
    (rule(weight={"dtype": "int8"}, input={"dtype": "bf16"}), f"{I}.dtype: 'bf16' is not allowed"),
    (
        rule(weight=INT4_G128, input={"dtype": "fp8_e5m2"}),
        f"{I}.dtype: input.dtype is fp8_e5m2; allowed: no input or int8, fp8_e4m3 with",
    ),
    (rule(weight={"dtype": "mxfp4"}, input={"dtype": "int8"}), "allowed: no input with weight"),
    (
        rule(weight={"dtype": "int8"}, input={"dtype": "int8", "dynamic": False}),
        f"{I}.dynamic: input.dynamic is False; allowed: true",
    ),
    (
        rule(weight={"dtype": "int8"}, input={"dtype": "int8", "granularity": "per_tensor"}),
        f"{I}.granularity: input.granularity is per_tensor; allowed: per_channel",
    ),
    (
        rule(weight={"dtype": "int8"}, input={"dtype": "int8", "symmetric": False}),
        f"{I}.symmetric: input.symmetric is False",
    ),
    (
        rule(weight={"dtype": "int8"}, input={"dtype": "int8", "rotation_group": 64}),
        f"{I}.rotation_group: input.rotation_group is 64; allowed: none",
    ),
]


@pytest.mark.parametrize(("section", "text"), BAD)
def test_bad_values_name_their_path(section, text):
    with pytest.raises(QuantConfigError) as error:
        parse_quantization_section(section)
    assert text in str(error.value)


def test_errors_carry_file_line_and_rule_id():
    section = {"rules": [{"id": "mlp", "match": {"name": "a"}, "weight": {"dtype": "int9"}}]}
    asked = []

    def line_of(path):
        asked.append(path)
        return 12

    with pytest.raises(QuantConfigError) as error:
        parse_quantization_section(section, source="p.yaml", line_of=line_of)
    assert str(error.value).startswith(
        "p.yaml:12: quantization.rules[0].weight.dtype (rule 'mlp'):"
    )
    assert asked == [("rules", 0, "weight", "dtype")]


def test_unknown_lines_and_sources_are_left_out():
    with pytest.raises(QuantConfigError) as error:
        parse_quantization_section({"method": "x"}, line_of=lambda path: 3)
    assert str(error.value).startswith("line 3: quantization.method")
    with pytest.raises(QuantConfigError) as error:
        parse_quantization_section({"method": "x"}, source="p.yaml", line_of=lambda path: None)
    assert str(error.value).startswith("p.yaml: quantization.method")
