import numpy as np
import pytest
import torch

from phyai.dispatch.arch import Arch, arch_at_least
from phyai.dispatch.device import probe_device
from phyai.dispatch.names import dtype_name
from phyai.dispatch.types import (
    DeviceProfile,
    KernelMode,
    KernelQuery,
    ModelContext,
    QuantFacts,
    ShapeFacts,
)


@pytest.mark.parametrize(
    ("arch", "bound", "expected"),
    [
        ("sm90", "sm80", True),
        ("sm90", "sm90", True),
        ("sm89", "sm90", False),
        ("sm103", "sm100", True),
        ("sm100", "sm103", False),
        ("sm120", "sm90", True),
        ("gfx942", "sm80", False),
    ],
)
def test_order_of_architectures(arch, bound, expected):
    assert arch_at_least(arch, bound) is expected


def test_gfx_has_no_order():
    with pytest.raises(ValueError, match="no order"):
        arch_at_least("gfx942", "gfx90a")


@pytest.mark.parametrize(
    ("text", "family"), [("SM90", "sm9"), ("sm120", "sm12"), ("gfx942", "gfx9"), ("sm90a", "sm9")]
)
def test_families(text, family):
    assert Arch.parse(text).family == family


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sm9", "without minor"),
        ("90", "has no series; write 'sm90'"),
        ("h200", "product name; write 'sm90'"),
        ("rtx5090", "write 'sm120'"),
        ("sm990", "implausible"),
        ("", "not of the form"),
        ("sm", "not of the form"),
        ("tpu4", "not of the form"),
        ("gfx9", "not of the form"),
    ],
)
def test_malformed_architectures(text, message):
    with pytest.raises(ValueError, match=message):
        Arch.parse(text)


def test_devices():
    assert probe_device("cpu") == DeviceProfile("cpu")
    assert probe_device(torch.device("cpu")) == DeviceProfile("cpu")
    assert probe_device("NVIDIA:SM90") == DeviceProfile("nvidia", "sm90")
    assert probe_device("amd:gfx942").arch == "gfx942"
    assert probe_device("npu:1") == DeviceProfile("ascend", None, 1)
    profile = DeviceProfile("nvidia", "sm100")
    assert probe_device(profile) is profile


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nvidia", "lacks an architecture"),
        ("nvidia:h100", "write 'sm90'"),
        ("nvidia:gfx942", "start with 'sm'"),
        ("nv:sm90", "did you mean 'nvidia'"),
        ("rocm:gfx942", "did you mean 'amd'"),
        ("sm90", "vendor:arch"),
        ("cpu:avx", "no named architectures"),
        ("nvidia:90", "write 'sm90'"),
    ],
)
def test_malformed_devices(text, message):
    with pytest.raises(ValueError, match=message):
        probe_device(text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without a GPU")
def test_cuda_without_gpu_says_what_to_do():
    with pytest.raises(ValueError, match="synthetic"):
        probe_device("cuda:0")


def test_modes():
    assert KernelMode.normalize("graph-capturing") is KernelMode.CAPTURE
    assert KernelMode.normalize("Replay") is KernelMode.REPLAY
    with pytest.raises(ValueError, match=r"'captured' is unknown; allowed: capture, eager"):
        KernelMode.normalize("captured")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.bfloat16, "bf16"),
        (torch.float8_e4m3fn, "fp8_e4m3"),
        ("half", "fp16"),
        ("FLOAT32", "fp32"),
        (torch.int8, "int8"),
    ],
)
def test_dtype_names(value, expected):
    assert dtype_name(value) == expected


def test_flat_shape_is_split():
    facts = ShapeFacts.build({"M": 5, "N": np.int64(3), "causal": True, "kind": "x", "gone": None})
    assert facts.dims == (("M", 5), ("N", 3), ("gone", None))
    assert type(facts.dims[1][1]) is int
    assert facts.attrs == (("causal", True), ("kind", "x"))


def test_queries_are_hashable_and_order_free():
    one = KernelQuery.build("Op", dtype=torch.float16, shape={"a": 1, "b": [1, 2], "c": 3})
    two = KernelQuery.build("op", dtype={"input": "half"}, shape={"c": 3, "b": (1, 2), "a": 1})
    assert one.cache_key == two.cache_key
    assert hash(one.cache_key) == hash(two.cache_key)
    assert one.dtype == (("input", "fp16"),)


def test_every_quant_fact_is_in_the_key():
    base = {"format": "int4", "block_shape": (1, 128), "fields": {"activation": "a16"}}
    other_block = {**base, "block_shape": (1, 64)}
    other_field = {**base, "fields": {"activation": "int8"}}
    keys = {KernelQuery.build("op", quant=q).cache_key for q in (base, other_block, other_field)}
    assert len(keys) == 3
    assert QuantFacts.build(base).block_k == 128


def test_quant_of_a_wrong_type():
    with pytest.raises(TypeError, match="PhysicalSignature or a mapping, got int"):
        QuantFacts.build(7)


def test_model_context_is_case_folded():
    assert ModelContext("PI05", "Robot") == ModelContext("pi05", frozenset({"robot"}))
