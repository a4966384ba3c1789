"""Known defects of systems like this one: call sites, tuning, weights and libraries.

Those of policies are in ``test_policy_defects.py``.
"""

import json
import re
from itertools import product

import pytest
import torch
from torch import nn

from phyai.dispatch import (
    CallSite,
    KernelQuery,
    Selector,
    kernel_selector_scope,
    policy_from_mapping,
)
from phyai.dispatch import library as libraries
from phyai.dispatch.conditions import eq
from phyai.kernels.humming_product import LOCKS, Buckets
from phyai.layers import Leg, Linear
from phyai_quant import (
    Granularity,
    QDType,
    QuantConfigError,
    QuantScheme,
    TensorQuant,
    load_quant_plan,
    materialize,
)
from phyai_quant.specs.base import AllocationRequest, LegSlice

BLOCK, CHANNEL, TENSOR = Granularity.BLOCK, Granularity.PER_CHANNEL, Granularity.PER_TENSOR
CPU = torch.device("cpu")
BF16 = {"input": torch.bfloat16}


def prefer(catalog, kernel_id):
    return policy_from_mapping({"rules": [{"prefer": kernel_id}]}, catalog=catalog)


def test_a_frozen_site_follows_its_selector(toy):
    """11.3: a frozen site kept its choice under another policy or selector."""
    selector = Selector(toy, device="cpu")
    with kernel_selector_scope(selector):
        site = CallSite("toy")
        site.select(device=CPU, dtype=BF16)
        site.freeze()
        selector.policy = prefer(toy, "slow.toy")
        assert site.select(device=CPU, dtype=BF16).kernel_id == "slow.toy"
        site.freeze()
    with kernel_selector_scope(Selector(toy, device="cpu")):
        assert site.select(device=CPU, dtype=BF16).kernel_id == "fast.toy"


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("quant.block_k", ({"block_shape": (1, 16)}, {"block_shape": (1, 32)})),
        ("quant.fields.activation", ({"fields": {"activation": "a16"}}, {"fields": {}})),
    ],
)
def test_a_site_tells_weights_apart_by_every_field(toy, add_row, path, values):
    """11.4: block sizes and format fields were not part of the memo's key."""
    wanted = {"quant.block_k": 16, "quant.fields.activation": "a16"}[path]
    add_row("own.toy", eq(path, wanted))
    with kernel_selector_scope(Selector(toy, device="cpu")):
        site = CallSite("toy")
        chosen = [
            site.select(device=CPU, dtype=BF16, quant={"format": "int4", **fields}).kernel_id
            for fields in (*values, *values)
        ]
    assert chosen == ["own.toy", "fast.toy"] * 2


def tuning(catalog, path, times):
    policy = policy_from_mapping({"profile": "autotune"}, catalog=catalog)

    def measure(impl, facts, selection):
        return times[impl.kernel_id]

    return Selector(catalog, policy, device="cpu", benchmark=measure, autotune_cache=path)


def test_capture_uses_what_eager_measured_if_it_may(toy, tmp_path):
    """11.7: tuning was lost in CUDA graphs, and the store knew nothing of the device."""
    path, times = tmp_path / "tuned.json", {"fast.toy": 3.0, "mid.toy": 2.0, "slow.toy": 1.0}
    selector = tuning(toy, path, times)
    eager, capture = (
        KernelQuery.build("toy", dtype="bf16", mode=mode) for mode in ("eager", "capture")
    )
    assert selector.select(eager).kernel_id == "slow.toy"
    assert selector.select(capture).kernel_id == "slow.toy"
    (entry,) = json.loads(path.read_text())["workloads"].values()
    assert torch.__version__.split("+")[0] in json.dumps(entry)
    # the fastest row may not be captured, the next one is taken
    other = tuning(toy, tmp_path / "other.json", {**times, "fast.toy": 0.5})
    assert other.select(eager).kernel_id == "fast.toy"
    assert other.select(capture).kernel_id == "slow.toy"


def test_every_layout_has_a_reference_on_the_cpu(catalog):
    """11.10: some layouts of quantized weights had no row on the CPU."""
    signatures = [
        *({"format": "fp8_e4m3", "granularity": str(g.value)} for g in (TENSOR, CHANNEL, BLOCK)),
        {"format": "fp8_e5m2", "granularity": "per_channel"},
        *(
            {"format": "nvfp4", "layout": layout, "block_shape": (1, 16)}
            for layout in ("linear", "128x4", "convrot")
        ),
        {"format": "mxfp4", "layout": "linear", "block_shape": (1, 32)},
        *({"format": name, "layout": "packed"} for name in ("int4", "int8")),
        *({"format": "int8", "layout": layout} for layout in (None, "convrot")),
        *({"format": name, "layout": "humming_raw"} for name in ("int4", "fp8_e4m3", "nvfp4")),
    ]
    selector, shape = Selector(catalog, device="cpu"), {"M": 2, "N": 64, "K": 128}
    for quant, dtype in product(signatures, ("fp32", "bf16")):
        query = KernelQuery.build(
            "gemm", dtype={"input": dtype, "output": dtype}, quant=quant, shape=shape
        )
        rows = [row.kernel_id for row in selector.explain(query).candidates if row.eligible]
        assert any(catalog.impl(row).reference for row in rows), quant


def test_every_operation_has_a_reference_on_the_cpu(catalog):
    """Paged and linear attention had none."""
    assert all(catalog.spec(op).requires_reference for op in catalog.ops())
    assert catalog.coverage_gaps() == ()


def test_block_inputs_have_one_scale_per_token_and_block():
    """11.11: one scale per row stood for all blocks of the row."""
    weight = TensorQuant(QDType.FP8_E4M3, BLOCK, block_shape=(128, 128))
    act = TensorQuant(QDType.FP8_E4M3, BLOCK, block_shape=(1, 128), dynamic=True)
    layer = nn.Module()
    spec = materialize(QuantScheme(weight, act), None)
    spec.allocate(layer, AllocationRequest((128, 256), torch.float32))
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    x[:, :128] *= 1e5
    view = spec.quantize_activation(x, layer)
    assert view.x_scale.shape == (3, 2)
    # the small half keeps its precision beside the large one
    read = spec.fake_quantize_activation(x, layer)
    assert (read - x)[:, 128:].norm() < 0.04 * x[:, 128:].norm()


@pytest.mark.parametrize("granularity", [TENSOR, CHANNEL])
def test_scales_of_fused_and_split_layers_are_loaded(granularity):
    """11.13: fused legs and ranks of a larger layer never got their scales."""
    scheme = QuantScheme(TensorQuant(QDType.FP8_E4M3, granularity))
    # this rank holds the second half of 8 and of 4 rows
    legs = (Leg("gate_proj", 4, 0), Leg("up_proj", 2, 1))
    slices = (LegSlice((8, 16), row_start=4), LegSlice((4, 16), row_start=2))
    layer = Linear(16, legs, prefix="mlp.gate_up_proj", scheme=scheme, slices=slices)
    expected, slots = [], {slot.key: slot for slot in layer.checkpoint_slots()}
    for leg, (rows, scale) in zip(legs, ((8, 0.5), (4, 3.0)), strict=True):
        codes = torch.randn(rows, 16, generator=torch.Generator().manual_seed(rows))
        codes = codes.to(torch.float8_e4m3fn)
        scales = torch.tensor(scale)
        if granularity is CHANNEL:
            scales = scale * torch.arange(1.0, rows + 1)[:, None]
        slots[f"mlp.{leg.name}.weight"].load(codes)
        slots[f"mlp.{leg.name}.weight_scale"].load(scales)
        expected.append((codes.float() * scales)[rows // 2 :])
    layer.post_load()
    assert layer.missing_parts() == []
    torch.testing.assert_close(layer.spec.dequantize_weight(layer), torch.cat(expected))


def plan_of(directory, **config):
    (directory / "config.json").write_text(json.dumps({"quantization_config": config}))
    return load_quant_plan(directory)


def groups(**weights):
    args = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True}
    return {"group_0": {"targets": ["Linear"], "weights": {**args, **weights}}}


def test_importers_keep_group_sizes_and_patterns(tmp_path):
    """11.14: group sizes were lost and exclusions matched whole names only."""
    plan = plan_of(
        tmp_path,
        quant_method="compressed-tensors",
        format="pack-quantized",
        config_groups=groups(),
        ignore=["re:.*lm_head", "model.layers.1.mlp"],
    )
    assert plan.resolve("model.layers.0.mlp.up_proj", Linear).weight.block_shape == (1, 64)
    assert plan.resolve("model.lm_head", Linear) is None


@pytest.mark.parametrize("algorithm", ["NVFP4_NEW", "FP8_SOMETHING", "W9A9"])
def test_unknown_algorithms_are_refused(tmp_path, algorithm):
    """11.14: any name containing FP4 or FP8 was taken for that format."""
    with pytest.raises(QuantConfigError, match=algorithm):
        plan_of(tmp_path, quant_method="modelopt", quant_algo=algorithm)


def test_unknown_methods_are_refused(tmp_path):
    """11.14: a config that no importer knew meant unquantized weights."""
    with pytest.raises(QuantConfigError, match="mystery"):
        plan_of(tmp_path, quant_method="mystery", bits=3)


def test_a_nested_config_is_read(tmp_path):
    """11.14: the config of a language model inside a larger one was not seen."""
    nested = {"quant_method": "compressed-tensors", "config_groups": groups()}
    nested["format"] = "pack-quantized"
    (tmp_path / "config.json").write_text(
        json.dumps({"text_config": {"quantization_config": nested}})
    )
    plan = load_quant_plan(tmp_path)
    assert plan.resolve("model.layers.0.mlp.up_proj", Linear).weight.block_shape == (1, 64)


def test_there_are_locks_for_every_split():
    """11.19: 1024 locks were too few for kernels that a policy names."""
    # Humming's own choices need at most 290 on 132 multiprocessors.
    assert LOCKS >= 4096


def test_quantizing_prints_nothing(capsys):
    """11.20: every NVFP4 layer printed a line while it was loaded."""
    nvfp4 = TensorQuant(QDType.NVFP4, BLOCK, micro_scaled=True, block_shape=(1, 16))
    for online in (True, False):
        layer = nn.Module()
        spec = materialize(QuantScheme(nvfp4, online=online), None)
        spec.allocate(layer, AllocationRequest((64, 128), torch.bfloat16))
        if online:
            spec.load_weight(layer, "weight", torch.randn(64, 128).bfloat16())
            spec.process_after_loading(layer)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "found", "usable"),
    [
        ("humming", "0.1.15", False),
        ("humming", "0.1.16", True),
        ("humming", "0.1.16.post1", True),
        ("humming", "1.0", True),
        ("humming", "0.0.99", False),
        ("flashinfer", "0.5.9", False),
        ("flashinfer", "0.6", True),
        ("flashinfer", "0.7.4", True),
        ("triton", "0.0.1", True),
    ],
)
def test_old_libraries_are_not_used(monkeypatch, name, found, usable):
    """11.21: whatever release was installed was called."""
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(libraries, "has_real_gpu", lambda: False)
    monkeypatch.setattr(libraries, "version", lambda package: found)
    asked = ["torch>=2.11", "flashinfer-python[cu13]>=0.6; extra == 'x'", "humming-kernels>=0.1.16"]
    monkeypatch.setattr(libraries, "requires", lambda package: asked)
    libraries.reset_library_probes()
    problem = libraries.library_problem(name)
    libraries.reset_library_probes()
    assert (problem is None) == usable
    assert usable or re.search(rf"{name} is version {found}; rows need \S+>=0", problem)


def test_the_oldest_libraries_are_those_that_the_package_asks_for():
    asked = "\n".join(libraries.requires("phyai-engine") or [])
    for name in ("flashinfer", "humming"):
        assert re.search(rf"^{libraries.DISTRIBUTIONS[name]}>=\d", asked, re.MULTILINE)
    libraries.reset_library_probes()
    assert "is version" not in (libraries.library_problem("humming") or "")


def test_only_kernels_for_the_rows_at_hand_are_compiled():
    """11.25: the first product compiled a kernel for every interval of M."""
    buckets = Buckets([[0, 8, {"tile": 8}], [8, 64, {"tile": 64}], [64, 2**30, {"tile": 128}]])
    assert {buckets.text(rows) for rows in (10, 50, 64)} == {json.dumps({"tile": 64})}
