"""Each shipped policy: its rows, its layers, and why a host without a GPU refuses it."""

import itertools
import re
from pathlib import Path

import pytest

from phyai.dispatch import KernelQuery, ModelContext, NoKernelError, Selector, load_policy
from phyai.dispatch.policy_diff import diff_policies
from phyai_quant.materialize import materialize

EXAMPLES = Path(__file__).parents[4] / "examples"
PI05 = EXAMPLES / "pi05"
LANGUAGE = "paligemma_with_expert.paligemma.model.language_model.layers"
EXPERT = "paligemma_with_expert.gemma_expert.model.layers"

# variant: (row, weight dtype, block, activation dtype, oldest architecture for bf16)
HUMMING = {
    "w4a16": ("w4a16", "int4", (1, 128), None, "sm80"),
    "w8a16": ("w8a16", "int8", (1, 128), None, "sm80"),
    "w4a8_int8": ("int4_a8", "int4", (1, 128), "int8", "sm80"),
    "w4a8_fp8_e4m3": ("int4_a8", "int4", (1, 128), "fp8_e4m3", "sm89"),
    "w8a8_int8": ("int8_a8", "int8", (1, 128), "int8", "sm80"),
    "fp8_e4m3_a16": ("fp8_a16", "fp8_e4m3", None, None, "sm80"),
    "fp8_e4m3_a8": ("fp8_a8", "fp8_e4m3", None, "fp8_e4m3", "sm89"),
    "fp8_e4m3_block_a8": ("fp8_a8", "fp8_e4m3", (128, 128), "fp8_e4m3", "sm89"),
    "fp8_e5m2_a16": ("fp8_a16", "fp8_e5m2", None, None, "sm80"),
    "fp8_e5m2_a8": ("fp8_a8", "fp8_e5m2", None, "fp8_e5m2", "sm89"),
    "fp8_e5m2_block_a8": ("fp8_a8", "fp8_e5m2", (128, 128), "fp8_e5m2", "sm89"),
    "mxfp4_a16": ("mxfp4_a16", "mxfp4", (1, 32), None, "sm80"),
    "nvfp4_a16": ("nvfp4_a16", "nvfp4", (1, 16), None, "sm80"),
}
OLDER = {"sm80": "sm75", "sm89": "sm87"}
QUANTIZED = {
    "pi05": [
        f"{LANGUAGE}.0.self_attn.qkv_proj",
        f"{LANGUAGE}.17.self_attn.o_proj",
        f"{EXPERT}.5.mlp.gate_up_proj",
        f"{EXPERT}.10.mlp.down_proj",
    ],
    "cosmos3": [
        "language_model.layers.0.self_attn.qkv_proj",
        "language_model.layers.35.self_attn.to_out",
        "language_model.layers.7.mlp.gate_up_proj",
        "language_model.layers.7.mlp.down_proj",
        "gen_layers.0.cross_attention.qkv_proj",
        "gen_layers.11.cross_attention.to_out",
        "gen_layers.3.mlp.gate_up_proj",
        "gen_layers.3.mlp.down_proj",
    ],
}
UNTOUCHED = {
    "pi05": [
        "paligemma_with_expert.paligemma.model.vision_tower.vision_model.encoder.layers.0.mlp.fc1",
        "paligemma_with_expert.paligemma.model.multi_modal_projector.linear",
        "paligemma_with_expert.paligemma.lm_head",
        f"{EXPERT}.3.input_layernorm.dense",
        f"{EXPERT}.3.mlp.down_proj.extra",
        f"prefix.{EXPERT}.3.mlp.down_proj",
        "action_in_proj",
        "action_out_proj",
        "time_mlp_in",
        "time_mlp_out",
    ],
    "cosmos3": [
        "language_model.embed_tokens",
        "language_model.norm",
        "language_model.layers.0.cross_attention.qkv_proj",
        "gen_layers.0.self_attn.qkv_proj",
        "gen_layers.0.mlp.down_proj.extra",
        "vae.gen_layers.0.mlp.down_proj",
        "proj_in",
        "proj_out",
        "time_embedder.linear_1",
        "action_proj_in",
        "audio_proj_out",
    ],
}
MODELS = tuple(QUANTIZED)
PORTABLE = ("convrot_int8", "convrot_nvfp4", "nvfp4")
TUNED = {
    "pi05": ("pi05_h200", "pi05_h200_fast"),
    "cosmos3": (
        "cosmos3_h200",
        "cosmos3_h200_fast",
        "cosmos3_h200_fp8",
        "cosmos3_h200_int8",
        "cosmos3_video_sparse",
    ),
}
# Presets of one tower, and the preset of both that they are part of.
GENERATION = {
    "generation_convrot_int8": "convrot_int8",
    "generation_convrot_nvfp4": "convrot_nvfp4",
    "generation_fp8_e4m3_a8": "humming_fp8_e4m3_a8",
}


def preset(model, name, catalog):
    return load_policy(EXAMPLES / model / "kernel_policies" / f"{name}.yaml", catalog=catalog)


def scheme_of(policy, model):
    """The scheme of the quantized layers, after checking that exactly those have one."""
    plan = policy.quant_plan
    scheme = plan.resolve(QUANTIZED[model][0])
    assert scheme.online
    assert all(plan.resolve(name) == scheme for name in QUANTIZED[model])
    assert all(plan.resolve(name) is None for name in UNTOUCHED[model])
    return scheme


@pytest.fixture(autouse=True)
def _libraries(monkeypatch):
    monkeypatch.setattr("phyai.dispatch.facts.library_problem", lambda name: None)


def humming_query(variant, device, dtype="bf16"):
    _, weight, block, activation, _ = HUMMING[variant]
    quant = {
        "format": weight,
        "layout": "humming",
        "block_shape": block,
        "granularity": "block" if block else "per_channel",
        "fields": {"activation": activation or "a16"},
    }
    dims = {"M": 50, "N": 8192, "K": 1024}
    dtypes = {"input": dtype, "output": dtype}
    return KernelQuery.build("gemm", device=device, dtype=dtypes, quant=quant, dims=dims)


@pytest.mark.parametrize("model", MODELS)
def test_the_presets_are_there(model):
    names = {path.stem for path in (EXAMPLES / model / "kernel_policies").glob("*.yaml")}
    towers = GENERATION if model == "cosmos3" else ()
    humming = (f"humming_{variant}" for variant in HUMMING)
    assert names == {*humming, *PORTABLE, *TUNED[model], *towers}


@pytest.mark.parametrize(("name", "whole"), GENERATION.items())
def test_presets_of_the_generation_tower_leave_the_other_one(name, whole, catalog):
    part, both = preset("cosmos3", name, catalog), preset("cosmos3", whole, catalog)
    scheme = scheme_of(both, "cosmos3")
    for layer in QUANTIZED["cosmos3"]:
        expected = scheme if layer.startswith("gen_layers.") else None
        assert part.quant_plan.resolve(layer) == expected, layer
    assert all(part.quant_plan.resolve(layer) is None for layer in UNTOUCHED["cosmos3"])
    changes = diff_policies(both, part, catalog)
    assert [change.where for change in changes] == ["quantization"]


@pytest.mark.parametrize(
    ("model", "name"), [(model, name) for model, names in TUNED.items() for name in names]
)
def test_tuned_presets_name_rows_that_an_h200_has(model, name, catalog):
    policy = preset(model, name, catalog)
    assert policy.rules
    for rule in policy.rules:
        assert rule.restrict_to is not None or rule.prefer
        for row in rule.candidates(catalog):
            package = catalog.impl(row).metadata.get("package")
            assert package in {None, "triton", "piper-kernels"}, "nothing to build"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("variant", HUMMING)
def test_humming_preset(variant, model, catalog):
    row, weight, block, activation, floor = HUMMING[variant]
    policy = preset(model, f"humming_{variant}", catalog)
    scheme = scheme_of(policy, model)
    assert (scheme.weight.dtype, scheme.weight.block_shape) == (weight, block)
    assert (scheme.input.dtype if scheme.input else None) == activation
    assert scheme.weight.micro_scaled is (weight in {"mxfp4", "nvfp4"})

    selector = Selector(catalog, policy, device="cpu", model=ModelContext(model))
    chosen = selector.explain(humming_query(variant, f"nvidia:{floor}"))
    assert chosen.selected == f"humming.gemm.{row}"
    assert chosen.matched_rules == ("humming-quantized-linear",)
    eligible = [candidate.kernel_id for candidate in chosen.candidates if candidate.eligible]
    assert eligible == [f"humming.gemm.{row}"]
    assert selector.explain(humming_query(variant, f"nvidia:{OLDER[floor]}")).selected is None

    with pytest.raises(NoKernelError) as caught:
        selector.select(humming_query(variant, "cpu"))
    assert "rule 'humming-quantized-linear'" in str(caught.value)
    text = str(caught.value)
    reason = text[text.index(f"no humming.gemm.{row}:") :].splitlines()[1]
    assert reason.strip() == "rejected: device.vendor == 'nvidia': is 'cpu'"


@pytest.mark.parametrize("variant", HUMMING)
def test_the_presets_of_both_models_differ_only_in_layers_and_attention(variant, catalog):
    changes = diff_policies(
        preset("pi05", f"humming_{variant}", catalog),
        preset("cosmos3", f"humming_{variant}", catalog),
        catalog,
    )
    assert [change.where for change in changes] == [
        "rules 'pi05-expert-joint-fa2'",
        "quantization",
    ]


def test_mxfp4_needs_bf16(catalog):
    policy = load_policy(PI05 / "kernel_policies" / "humming_mxfp4_a16.yaml", catalog=catalog)
    selector = Selector(catalog, policy, device="cpu")
    trace = selector.explain(humming_query("mxfp4_a16", "nvidia:sm90", "fp16"))
    rows = {row.kernel_id: row for row in trace.candidates}
    assert "dtype.output == 'bf16': is 'fp16'" in rows["humming.gemm.mxfp4_a16"].reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"N": 96}, "shape.N % 64 == 0: is 96"),
        ({"K": 1000}, "shape.K % 32 == 0: is 1000"),
    ],
)
def test_misaligned_shapes_are_explained(catalog, change, reason):
    policy = load_policy(PI05 / "kernel_policies" / "humming_w4a16.yaml", catalog=catalog)
    selector = Selector(catalog, policy, device="cpu")
    dims = {"M": 1, "N": 8192, "K": 1024, **change}
    quant = {"format": "int4", "layout": "humming", "fields": {"activation": "a16"}}
    query = KernelQuery.build(
        "gemm",
        device="nvidia:sm90",
        dtype={"input": "bf16", "output": "bf16"},
        quant=quant,
        dims=dims,
    )
    rows = {row.kernel_id: row.reason for row in selector.explain(query).candidates}
    assert rows["humming.gemm.w4a16"] == reason


@pytest.mark.parametrize(
    "path", ["kernel_policy.yaml", *(f"kernel_policies/humming_{v}.yaml" for v in HUMMING)]
)
def test_expert_attention_rule(path, catalog):
    policy = load_policy(PI05 / path, catalog=catalog)
    selector = Selector(catalog, policy, device="cpu", model=ModelContext("pi05"))

    def ask(role, device, dtype="bf16"):
        return selector.explain(
            KernelQuery.build(
                "attention_paged",
                role=role,
                device=device,
                dtype=dtype,
                dims={"tokens": 50, "heads": 8, "kv_heads": 1, "head_dim": 256},
                attrs={"layout": "paged", "causal": False},
            )
        )

    assert ask("expert", "nvidia:sm90").selected == "flashinfer.attention_paged.fa2"
    assert ask("expert", "nvidia:sm90", "fp32").selected == "eager.attention_paged"
    assert ask("prefix", "nvidia:sm90").selected == "flashinfer.attention_paged"
    assert ask("expert", "nvidia:sm80").matched_rules == ()
    on_cpu = ask("expert", "cpu")
    assert (on_cpu.selected, on_cpu.matched_rules) == ("eager.attention_paged", ())
    rows = {row.kernel_id: row.reason for row in on_cpu.candidates}
    assert rows["flashinfer.attention_paged.fa2"] == "device.vendor == 'nvidia': is 'cpu'"


# preset: (weight dtype, rotation, input dtype, rule, row on the CPU)
ROWS = {
    "convrot_int8": ("int8", 64, "int8", "convrot-int8-linear", ".gemm.convrot_int8"),
    "convrot_nvfp4": ("nvfp4", 64, "nvfp4", "convrot-nvfp4-linear", ".gemm.convrot_nvfp4"),
    "nvfp4": ("nvfp4", None, "nvfp4", "nvfp4-linear", ".gemm.nvfp4_linear"),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", PORTABLE)
def test_portable_presets_run_on_every_device(name, model, catalog):
    weight, rotation, activation, rule, row = ROWS[name]
    policy = preset(model, name, catalog)
    scheme = scheme_of(policy, model)
    assert (scheme.weight.dtype, scheme.weight.rotation_group) == (weight, rotation)
    assert (scheme.input.dtype, scheme.input.dynamic) == (activation, True)
    selector = Selector(catalog, policy, device="cpu", model=ModelContext(model))
    for device, sm in (("cpu", None), ("nvidia:sm90", 90), ("amd:gfx1201", None)):
        signature = materialize(scheme, sm).physical_signature
        dims = {"M": 50, "N": 1024, "K": 2048}
        query = KernelQuery.build(
            "gemm",
            device=device,
            dtype={"input": "bf16", "output": "bf16"},
            quant=signature,
            dims=dims,
        )
        trace = selector.explain(query)
        assert trace.selected.endswith(row)
        assert trace.matched_rules == (rule,)


@pytest.mark.parametrize("model", MODELS)
def test_plain_nvfp4_names_the_fp4_row_of_blackwell(model, catalog):
    policy = preset(model, "nvfp4", catalog)
    signature = materialize(scheme_of(policy, model), 100).physical_signature
    query = KernelQuery.build(
        "gemm",
        device="nvidia:sm100",
        dtype={"input": "bf16", "output": "bf16"},
        quant=signature,
        dims={"M": 50, "N": 1024, "K": 2048},
    )
    trace = Selector(catalog, policy, device="cpu").explain(query)
    assert trace.selected == "flashinfer.gemm.nvfp4_128x4"
    assert trace.matched_rules == ("nvfp4-linear",)


def test_comments_state_the_architecture_that_the_rows_demand():
    for model, (variant, (*_, floor)) in itertools.product(MODELS, HUMMING.items()):
        path = EXAMPLES / model / "kernel_policies" / f"humming_{variant}.yaml"
        text = path.read_text(encoding="utf-8")
        assert re.search(rf"needs {floor.upper()} or newer", text), variant
