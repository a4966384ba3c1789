"""Every format loaded on two ranks holds the slices of what one rank holds."""

from dataclasses import dataclass

import pytest
import torch

from phyai_quant import QuantConfigError, QuantScheme, TensorQuant, materialize
from phyai_quant.specs.base import AllocationRequest, LegSlice
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor

E4M3 = torch.float8_e4m3fn
LEGS = {"q": 32, "k": 16, "v": 16}
COLUMNS = 256


def source(rows, columns):
    return torch.randn(rows, columns)


def unquantized(rows, columns):
    return {"weight": source(rows, columns)}


def scales(*shape):
    return torch.rand(shape) + 0.1


def bytes_(*shape, low=0, high=256, dtype=torch.uint8):
    return torch.randint(low, high, shape, dtype=dtype)


def words(rows, count):
    return torch.randint(-(2**31), 2**31, (rows, count), dtype=torch.int32)


def fp8(shape_of, dtype=E4M3):
    def build(rows, columns):
        weight = (torch.randn(rows, columns) * 30).to(dtype)
        return {"weight": weight, "weight_scale": scales(*shape_of(rows, columns))}

    return build


def mxfp8(rows, columns):
    return {
        "weight": torch.randn(rows, columns).to(E4M3),
        "weight_scale": bytes_(rows, columns // 32, low=110, high=140),
    }


def nvfp4_modelopt(rows, columns):
    return {
        "weight": bytes_(rows, columns // 2),
        "weight_scale": scales(rows, columns // 16).to(E4M3),
        "weight_scale_2": scales(),
        "input_scale": scales(),
    }


def nvfp4_reciprocal(rows, columns):
    return {
        "weight_packed": bytes_(rows, columns // 2),
        "weight_scale": scales(rows, columns // 16).to(E4M3),
        "weight_global_scale": scales(1),
    }


def nvfp4_tiles(rows, columns):
    weight = PiperNVFP4Tensor.from_hp(
        source(rows, columns), compute_per_tensor_scale=True, is_swizzled_scales=True
    )
    return _stored_nvfp4(weight)


def convrot_nvfp4(rows, columns):
    weight = ConvRotNVFP4Tensor.from_hp(
        source(rows, columns), group_size=64, compute_per_tensor_scale=True
    )
    return _stored_nvfp4(weight)


def _stored_nvfp4(weight):
    return {
        "weight": weight.qdata,
        "weight_scale": weight.scale,
        "weight_scale_2": weight.per_tensor_scale,
    }


def mxfp4(rows, columns):
    return {
        "weight_packed": bytes_(rows, columns // 2),
        "weight_scale": bytes_(rows, columns // 32, low=110, high=140),
    }


def convrot_int8(rows, columns):
    weight = ConvRotInt8Tensor.from_hp(source(rows, columns), group_size=64)
    return {"weight": weight.qdata, "weight_scale": weight.scale, "input_scale": scales()}


def int8_rows(rows, columns):
    return {
        "weight": bytes_(rows, columns, low=-128, high=128, dtype=torch.int8),
        "weight_scale": scales(rows, 1),
    }


def int4_groups(rows, columns):
    return {
        "weight_packed": words(rows, columns // 8),
        "weight_scale": scales(rows, columns // 32).bfloat16(),
        "weight_shape": torch.tensor([rows, columns]),
    }


def int4_zero_points(rows, columns):
    return {**int4_groups(rows, columns), "weight_zero_point": words(rows // 8, columns // 32)}


def quant(dtype, block=None, **fields):
    granularity = "per_channel" if block is None else "block"
    micro = fields.pop("micro_scaled", dtype in ("nvfp4", "mxfp4"))
    return TensorQuant(dtype, granularity, micro_scaled=micro, block_shape=block, **fields)


@dataclass(frozen=True)
class Case:
    weight: TensorQuant | None
    build: object = unquantized
    act: TensorQuant | None = None
    online: bool = False
    sm: int | None = None
    rotated: bool = False
    stored_by: str | None = None

    def spec(self):
        if self.weight is None:
            return materialize(None)
        scheme = QuantScheme(self.weight, self.act, self.online, self.stored_by)
        return materialize(scheme, self.sm)


NVFP4 = quant("nvfp4", (1, 16))
NVFP4_INPUT = quant("nvfp4", (1, 16), dynamic=True)
TOKEN = quant("int8", dynamic=True)
CASES = {
    "bf16": Case(None),
    "fp8_per_tensor": Case(TensorQuant("fp8_e4m3", "per_tensor"), fp8(lambda n, k: ())),
    "fp8_per_channel": Case(quant("fp8_e4m3"), fp8(lambda n, k: (n, 1))),
    "fp8_block": Case(quant("fp8_e4m3", (8, 32)), fp8(lambda n, k: (n // 8, k // 32))),
    "fp8_e5m2": Case(quant("fp8_e5m2"), fp8(lambda n, k: (n,), torch.float8_e5m2)),
    "mxfp8": Case(quant("fp8_e4m3", (1, 32), micro_scaled=True), mxfp8),
    "nvfp4_modelopt": Case(NVFP4, nvfp4_modelopt, NVFP4_INPUT),
    "nvfp4_reciprocal": Case(NVFP4, nvfp4_reciprocal),
    "nvfp4_128x4": Case(NVFP4, nvfp4_reciprocal, NVFP4_INPUT, sm=100),
    "nvfp4_tiles_on_disk": Case(quant("nvfp4", (1, 16), swizzled_scales=True), nvfp4_tiles),
    "nvfp4_online": Case(NVFP4, act=NVFP4_INPUT, online=True),
    "mxfp4": Case(quant("mxfp4", (1, 32)), mxfp4),
    "convrot_int8": Case(quant("int8", rotation_group=64), convrot_int8, TOKEN, rotated=True),
    "convrot_int8_online": Case(
        quant("int8", rotation_group=64), act=TOKEN, online=True, rotated=True
    ),
    "convrot_nvfp4": Case(
        quant("nvfp4", (1, 16), rotation_group=64), convrot_nvfp4, NVFP4_INPUT, rotated=True
    ),
    "convrot_nvfp4_online": Case(
        quant("nvfp4", (1, 16), rotation_group=64), online=True, rotated=True
    ),
    "int8_rows": Case(quant("int8"), int8_rows, TOKEN),
    "int4_packed": Case(quant("int4", (1, 32)), int4_groups),
    "int4_packed_asymmetric": Case(quant("int4", (1, 32), symmetric=False), int4_zero_points),
    "fp8_rows": Case(
        quant("fp8_e4m3"),
        act=quant("fp8_e4m3", dynamic=True),
        online=True,
        stored_by="fp8_rows",
    ),
    "humming_int4": Case(quant("int4", (1, 64)), online=True),
    "humming_int8": Case(quant("int8"), act=TOKEN, online=True),
    "humming_fp8_per_tensor": Case(TensorQuant("fp8_e4m3", "per_tensor"), online=True),
    "humming_nvfp4": Case(NVFP4, online=True),
    "humming_mxfp4": Case(quant("mxfp4", (1, 32)), online=True),
}


@pytest.fixture(params=CASES)
def case(request):
    torch.manual_seed(list(CASES).index(request.param))
    return CASES[request.param]


def load(make_layer, case, tensors, rank_legs, columns):
    """Loads one rank.

    Args:
        make_layer: The fixture.
        case: The format.
        tensors: Whole checkpoint tensors by leg id; the id None stands for all legs stacked.
        rank_legs: Leg id to its slice and the rows held.
        columns: Columns held.
    """
    layer, spec = make_layer("a.qkv_proj"), case.spec()
    widths = tuple(rows for _, rows in rank_legs.values())
    request = AllocationRequest(
        (sum(widths), columns),
        torch.float32,
        widths,
        tuple(rank_legs),
        slices=tuple(part for part, _ in rank_legs.values()),
    )
    spec.allocate(layer, request)
    for leg, whole in tensors.items():
        for name, tensor in whole.items():
            spec.load_weight(layer, name, tensor, leg)
    assert spec.missing_parts(layer) == []
    spec.process_after_loading(layer)
    return spec.dequantize_weight(layer)


def whole_legs(legs):
    return {leg: (LegSlice((rows, COLUMNS)), rows) for leg, rows in legs.items()}


def check(case, parts, expected):
    assert expected.isfinite().all()
    if case.rotated:
        torch.testing.assert_close(parts, expected, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(parts, expected)


def test_rows_of_one_leg(make_layer, case):
    tensors = {None: case.build(32, COLUMNS)}
    whole = load(make_layer, case, tensors, whole_legs({None: 32}), COLUMNS)
    ranks = [
        load(make_layer, case, tensors, {None: (LegSlice((32, COLUMNS), 16 * r), 16)}, COLUMNS)
        for r in range(2)
    ]
    check(case, torch.cat(ranks), whole)


def test_columns_of_one_leg(make_layer, case):
    tensors = {None: case.build(32, COLUMNS)}
    whole = load(make_layer, case, tensors, whole_legs({None: 32}), COLUMNS)
    half = COLUMNS // 2
    ranks = [
        load(make_layer, case, tensors, {None: (LegSlice((32, COLUMNS), 0, half * r), 32)}, half)
        for r in range(2)
    ]
    check(case, torch.cat(ranks, dim=1), whole)


@pytest.mark.parametrize("kv_replicas", [1, 2])
def test_rows_of_fused_legs(make_layer, case, kv_replicas):
    tensors = {leg: case.build(rows, COLUMNS) for leg, rows in LEGS.items()}
    whole = load(make_layer, case, tensors, whole_legs(LEGS), COLUMNS)
    for rank in range(2):
        held, expected, start = {}, [], 0
        for leg, rows in LEGS.items():
            count = rows if leg != "q" and kv_replicas == 2 else rows // 2
            first = 0 if count == rows else rank * count
            held[leg] = (LegSlice((rows, COLUMNS), first), count)
            expected.append(whole[start + first : start + first + count])
            start += rows
        part = load(make_layer, case, tensors, held, COLUMNS)
        check(case, part, torch.cat(expected))


def test_rows_of_a_natively_fused_checkpoint(make_layer, case):
    tensors = {None: case.build(sum(LEGS.values()), COLUMNS)}
    whole = load(make_layer, case, tensors, whole_legs(LEGS), COLUMNS)
    for rank in range(2):
        held, expected, start = {}, [], 0
        for leg, rows in LEGS.items():
            held[leg] = (LegSlice((rows, COLUMNS), rank * rows // 2), rows // 2)
            first = start + rank * rows // 2
            expected.append(whole[first : first + rows // 2])
            start += rows
        check(case, load(make_layer, case, tensors, held, COLUMNS), torch.cat(expected))


def test_tensors_cut_by_the_caller_are_refused(make_layer, case):
    tensors = {None: case.build(16, COLUMNS)}
    held = {None: (LegSlice((32, COLUMNS), 16), 16)}
    with pytest.raises(QuantConfigError, match=r"a\.qkv_proj: .*shape"):
        load(make_layer, case, tensors, held, COLUMNS)
