"""`phyai explain --model`: every call and every weight of the tiny checkpoint, on any device."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phyai.cli import engines
from phyai.cli.layer_formats import IN_CODE, group_formats, target_format
from phyai.cli.queries import query_of
from phyai.cli.recording import record_engine, record_shapes
from phyai.dispatch import Selector, build_catalog, kernel_selector_scope
from phyai.layers import Leg, Linear
from phyai_quant import Matcher, QuantPlan, QuantScheme, TensorQuant
from phyai_quant.rules import Rule

CHECKPOINT = Path(__file__).parents[1] / "fixtures" / "pi05_tiny"
HUMMING = Path(__file__).parents[4] / "examples/pi05/kernel_policies/humming_w4a16.yaml"
POLICY = """
schema: phyai.kernel/v1
rules:
  - id: portable-products
    match: {op: gemm, role: language}
    prefer: [piper.gemm.convrot_int8, torch.gemm.convrot_int8]
  - {id: broad, priority: -1, match: {op: gemm}, restrict_to: "*.gemm.*"}
quantization:
  rules:
    - id: down
      match: {regex: '.*language_model\\.layers\\.\\d+\\.mlp\\.down_proj'}
      weight: {dtype: int8, granularity: per_channel, rotation_group: 64}
      input: {dtype: int8, granularity: per_channel, dynamic: true}
"""
pytestmark = pytest.mark.usefixtures("plain_environment")


@pytest.fixture
def policy(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    return path


@pytest.fixture
def no_weights(monkeypatch):
    """Reading a tensor of the checkpoint fails the test."""

    def refuse(self):
        raise AssertionError("weights were read")

    monkeypatch.setattr("phyai.checkpoints.CheckpointReader.tensors", refuse)


def test_every_call_and_weight_for_a_gpu_that_is_not_here(phyai, policy, no_weights):
    result = phyai(
        *("explain", "--model", CHECKPOINT, "--policy", policy),
        *("--device", "nvidia:sm90", "--format", "json"),
    )
    assert result.code == 0, result.err
    report = result.json
    assert (report["device"], report["family"], report["problems"]) == ("sm90", "pi05", [])
    assert report["policy"]["source"] == str(policy)
    assert report["sites"] == sum(group["count"] for group in report["groups"])
    layers = {entry["name"]: entry for entry in report["layers"]}
    quantized = [entry for entry in layers.values() if entry["scheme"] != "unquantized"]
    assert [entry["name"].rpartition(".")[2] for entry in quantized] == ["down_proj"] * 2
    for entry in quantized:
        assert entry["rule"].endswith("(quantization.rules[0] 'down')")
        assert entry["spec"].startswith("convrot_int8")
        assert entry["scheme"].startswith("weight int8 per_channel rotated by 64")
    (down,) = [g for g in report["groups"] if quantized[0]["name"] in g["modules"]]
    assert down["facts"]["quant.layout"] == "convrot"
    assert down["facts"]["device.arch"] == "sm90"
    assert down["matched_rules"] == ["portable-products"]
    verdicts = {rule["id"]: rule for rule in down["rules"]}
    assert verdicts["broad"]["matched"]
    assert "priority 0 over -1" in verdicts["broad"]["reason"]
    assert all(row["reason"] for row in down["candidates"] if not row["eligible"])
    asked = {name for group in report["groups"] for name in group["modules"]}
    used = {name for name in layers if name in asked}
    # All layers are asked but those whose result is constant over the chunk or unused.
    assert len(used) == len(layers)


def test_a_policy_that_does_not_fit_names_every_layer_and_reason(phyai, no_weights):
    result = phyai(
        *("explain", "--model", CHECKPOINT, "--policy", HUMMING, "--device", "nvidia:sm90")
    )
    assert result.code == 1
    assert "21 layers cannot be stored" in result.err
    assert "PROBLEM: 21 layers cannot be stored" in result.out
    assert "N = 160 is not a multiple of 64" in result.out
    assert "problem   the weight cannot be stored" in result.out
    assert "torch.gemm.bf16" in result.out


def test_the_markdown_report_is_a_page(phyai, policy, tmp_path):
    page = tmp_path / "report.md"
    options = ("explain", "--model", CHECKPOINT, "--policy", policy, "--device", "nvidia:sm90")
    result = phyai(*options, "--format", "markdown", "--output", page)
    assert result.code == 0, result.err
    assert result.out == ""
    assert "wrote" in result.err
    text = page.read_text()
    report = phyai(*options, "--json").json
    assert text.startswith("# Kernels of pi05_tiny on sm90\n")
    headings = [line for line in text.splitlines() if line.startswith("### ")]
    assert len(headings) == len(report["groups"])
    for number, group in enumerate(report["groups"], 1):
        assert headings[number - 1].startswith(f"### {number}. {group['op']}")
        for row in group["candidates"]:
            assert f"| `{row['kernel_id']}` |" in text
            assert row["eligible"] or row["reason"].replace("|", "\\|") in text
    columns = [line.count(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert min(columns) >= 2
    assert "layers.[0-1].mlp.down_proj`" in text


def test_shapes_alone_ask_what_a_running_engine_asks():
    request = engines.EngineRequest(
        CHECKPOINT, "cpu", engines.Precision.BF16, allow_identity_norm=True
    )
    engine = engines.build_engine(request)
    engine.infer(engines.synthetic_observation(engine), seed=0, num_steps=1)
    run = record_engine(engine)
    shapes = record_shapes(CHECKPOINT, torch.bfloat16, engine.selector)

    def questions(recording):
        return sorted((call.where, repr(query_of(call.trace))) for call in recording.calls)

    assert questions(shapes) == questions(run)
    assert len(shapes.layers) == len(run.layers)


def test_the_device_of_this_machine_reports_the_weights_it_loaded(phyai, policy):
    options = ("explain", "--checkpoint", CHECKPOINT, "--device", "cpu", "--policy", policy)
    result = phyai(*options, "--format", "json")
    assert result.code == 0, result.err
    there = phyai(
        *("explain", "--checkpoint", CHECKPOINT, "--device", "nvidia:sm90", "--policy", policy),
        "--json",
    ).json

    def formats(report):
        return {entry["name"]: (entry["rule"], entry["spec"]) for entry in report["layers"]}

    assert formats(result.json) == formats(there)


@pytest.mark.parametrize("device", ["cpu", "nvidia:sm90"])
def test_a_model_can_be_asked_about_for_graph_capture(phyai, device, monkeypatch):
    catalog = build_catalog()
    unsafe = {row["id"] for row in catalog.manifest() if row["op"] == "rope"}
    for kernel_id in unsafe - {"eager.rope"}:
        catalog._impls[kernel_id] = replace(catalog.impl(kernel_id), capture_safe=False)
    entry = catalog.entry("rope")
    entry.impls = tuple(catalog.impl(row.kernel_id) for row in entry.impls)
    monkeypatch.setattr("phyai.dispatch.bootstrap.build_catalog", lambda: catalog)
    options = ("explain", "--model", CHECKPOINT, "--device", device, "--mode", "capture")
    (group,) = phyai(*options, "--op", "rope", "--json").json["groups"]
    assert group["facts"]["mode"] == "capture"
    reasons = {row["kernel_id"]: row["reason"] for row in group["candidates"]}
    assert "is not capture-safe (mode capture)" in reasons.values()
    assert group["selected"] == "eager.rope"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--model", CHECKPOINT, "--checkpoint", CHECKPOINT], 2, "name the same thing"),
        (["--model", CHECKPOINT, "--json", "--format", "text"], 2, "contradict each other"),
        (["--model", CHECKPOINT, "--format", "yaml"], 2, "yaml"),
        (["--model", CHECKPOINT, "--output", "gone/report.md"], 1, "gone"),
        (["--model", "/gone/model", "--device", "nvidia:sm90"], 1, "/gone/model does not exist"),
        (["--model", CHECKPOINT, "--device", "nvidia:sm90", "--op", "conv"], 1, "leave out --op"),
        (["--model", CHECKPOINT, "--device", "nvidia:h100"], 1, "h100"),
        (["--model", CHECKPOINT, "--device", "nvidia:sm90", "--mode", "lazy"], 1, "'lazy'"),
    ],
)
def test_errors(phyai, arguments, code, words):
    result = phyai("explain", *arguments)
    assert result.code == code, result.err
    assert words in result.err
    assert result.out == "" or "--json" in arguments


INT4 = QuantScheme(TensorQuant("int4", "block", block_shape=(1, 128)), online=True)


def meta_layer(**options):
    with kernel_selector_scope(Selector(device="cpu")):
        return Linear(256, options.pop("legs", 128), device="meta", prefix="a.mlp.fc1", **options)


def plan(*rules):
    return QuantPlan(
        tuple(Rule(Matcher("glob", glob), scheme, source) for glob, scheme, source in rules)
    )


def test_a_weight_takes_the_format_of_the_target(monkeypatch):
    monkeypatch.setattr("phyai_quant.specs.humming.find_spec", lambda name: object())
    rules = plan(("*.mlp.*", INT4, "here"))
    there, spec = target_format(meta_layer(params_dtype=torch.bfloat16), rules, 90)
    assert spec.physical_signature.layout == "humming"
    assert (there.rule, there.shape, there.problem) == ("glob *.mlp.* (here)", (128, 256), "")
    here, spec = target_format(meta_layer(params_dtype=torch.bfloat16), rules, None)
    assert spec.physical_signature.layout == "humming_raw"
    assert here.scheme == there.scheme
    plain, spec = target_format(meta_layer(), plan(("*.other", INT4, "")), 90)
    assert plain.rule == "no rule matches, the plan's default"
    assert spec.physical_signature.format == "bf16"
    assert target_format(meta_layer(), None, 90)[0].rule == "no plan"


W8A16 = TensorQuant("int8", "per_channel")
CONVROT = QuantScheme(
    TensorQuant("int8", "per_channel", rotation_group=16),
    TensorQuant("int8", "per_channel", dynamic=True),
    online=True,
)


@pytest.mark.parametrize(
    ("scheme", "width", "layouts"),
    [
        (None, 64, (None, None, None)),
        (QuantScheme(W8A16), 64, (None, "humming", None)),
        (QuantScheme(W8A16), 60, (None, "packed", None)),
        (QuantScheme(W8A16, online=True), 64, ("humming_raw", "humming", "none")),
        (QuantScheme(W8A16, online=True), 60, ("humming_raw", "none", "none")),
        (CONVROT, 60, ("convrot", "convrot", "convrot")),
    ],
)
def test_a_format_fits_the_size_of_the_layer(monkeypatch, scheme, width, layouts):
    """On another device, SM90 and SM75; "none" where the layer cannot be stored."""
    for module in ("humming", "humming_checkpoint"):
        monkeypatch.setattr(f"phyai_quant.specs.{module}.find_spec", lambda name: object())
    layer = meta_layer(legs=width, params_dtype=torch.bfloat16)
    problems = {
        90: "N = 60 is not a multiple of 64",
        75: "needs SM80 or newer and this GPU is SM75",
    }
    for sm, layout in zip((None, 90, 75), layouts, strict=True):
        entry, spec = target_format(layer, plan(("*", scheme, "")), sm)
        if layout == "none":
            assert spec is None
            assert problems[sm] in entry.problem
        else:
            assert spec.physical_signature.layout == layout
            assert entry.spec == spec.spec_id


def test_a_list_of_names_is_one_rule():
    names = [f"model.layers.{index}.fc1" for index in range(3)]
    rules = QuantPlan(
        tuple(Rule(Matcher("name", name), None, f"config.json: ignore: {name}") for name in names)
    )
    with kernel_selector_scope(Selector(device="cpu")):
        layers = [Linear(8, 4, device="meta", prefix=name) for name in names]
    (group,) = group_formats(target_format(layer, rules, 90)[0] for layer in layers)
    assert group.first.rule == "name of the layer (config.json: ignore)"
    assert group.names == ("model.layers.[0-2].fc1",)


def test_a_missing_library_and_legs_that_disagree_are_problems(monkeypatch):
    monkeypatch.setattr("phyai_quant.specs.humming.find_spec", lambda name: None)
    entry, spec = target_format(meta_layer(), plan(("*", INT4, "")), 90)
    assert spec is None
    assert "humming-kernels is not installed" in entry.problem
    legs = [Leg("gate_proj", 64, 0), Leg("up_proj", 64, 1)]
    entry, spec = target_format(meta_layer(legs=legs), plan(("*.up_proj", INT4, "")), 90)
    assert spec is None
    assert "different schemes" in entry.problem


def test_a_scheme_given_in_code_goes_before_a_plan():
    layer = meta_layer(scheme=INT4, params_dtype=torch.bfloat16)
    entry, spec = target_format(layer, plan(("*", None, "")), None)
    assert entry.rule == IN_CODE
    assert spec is layer.spec


def test_the_json_form_holds_json_types_only(phyai):
    result = phyai("explain", "--op", "rmsnorm", "--fact", "dtype.input=bf16", "--json")
    assert json.loads(json.dumps(result.json)) == result.json
    assert result.json["layers"] == []
    assert result.json["checkpoint"] is None
