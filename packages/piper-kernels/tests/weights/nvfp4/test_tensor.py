import copy

import pytest
import torch
from torchao.prototype.mx_formats.nvfp4_tensor import (
    NVFP4Tensor,
    QuantizeTensorToNVFP4Kwargs,
)

from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor
from piper_kernels.weights.nvfp4._layout import swap_packed_pairs

FLOATS = [torch.float16, torch.bfloat16, torch.float32]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def dense(rows=7, features=64, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows + features)
    return torch.randn(rows, features, generator=generator).to(dtype)


def test_decoding_by_the_definition(make_weight):
    weight = make_weight(5, 48)
    scale = weight.scale.view(torch.uint8).flatten().tolist()
    level = 1.0 if weight.per_tensor_scale is None else weight.per_tensor_scale.item()
    stored = torch.empty(5, 48, dtype=torch.float64)
    for row in range(5):
        for feature in range(48):
            byte = weight.qdata[row, feature // 2].item()
            high = (feature % 2 == 1) != weight.high_first
            code = byte >> 4 if high else byte & 15
            block = feature // 16
            offset = row * 3 + block
            if weight.is_swizzled_scales:
                offset = (row % 32) * 16 + (row // 32) * 4 + block
            bits = torch.tensor(scale[offset], dtype=torch.uint8)
            value = E2M1[code & 7] * (-1 if code & 8 else 1)
            stored[row, feature] = value * bits.view(torch.float8_e4m3fn).item() * level
    actual = PiperNVFP4Tensor.dequantize(weight)  # of a rotated weight the stored basis
    torch.testing.assert_close(actual.double(), stored, rtol=2e-7, atol=0)


def test_presents_the_logical_tensor(make_weight):
    weight = make_weight(7, 64, torch.float16)
    assert weight.shape == (7, 64)
    assert weight.stride() == (64, 1)
    assert weight.dtype == weight.orig_dtype == torch.float16
    assert weight.block_size == 16
    assert not weight.transposed
    assert not weight.requires_grad
    assert isinstance(weight, NVFP4Tensor)
    assert type(weight).__name__ in repr(weight)
    assert "(7, 64)" in repr(weight)
    assert "meta" in repr(weight.to("meta"))


def test_flat_scales_are_accepted(make_weight):
    weight = make_weight()
    expected = weight.dequantize()
    weight.scale = weight.scale.flatten()
    for form in (weight, weight.t().t(), weight.clone()):
        assert torch.equal(form.dequantize(), expected)
    assert torch.equal(weight.t().dequantize(), expected.t())
    assert weight.get_hp_scales().shape == (7, 4)


def test_hp_scales_of_a_transpose(weight):
    assert torch.equal(weight.t().get_hp_scales(), weight.get_hp_scales())
    assert weight.get_hp_scales().dtype == torch.float32


def test_nibble_order_does_not_change_the_weight(plain):
    low, high = plain(), plain(high_first=True)
    assert not torch.equal(low.qdata, high.qdata)
    assert torch.equal(low.qdata, swap_packed_pairs(high.qdata))
    assert torch.equal(low.dequantize(), high.dequantize())
    assert high.clone().high_first
    assert high.t().high_first
    assert high.to(torch.float16).high_first


def test_stacks_of_matrices():
    source = torch.randn(3, 128, 32)
    level = torch.tensor([0.001, 0.01, 0.1]).view(3, 1, 1)
    for swizzled in (False, True):
        options = {"per_tensor_scale": level, "is_swizzled_scales": swizzled}
        weight = PiperNVFP4Tensor.from_hp(source, **options)
        assert weight.shape == (3, 128, 32)
        assert weight.stride() == (4096, 32, 1)
        assert weight.view(3, 128, 32).qdata.data_ptr() == weight.qdata.data_ptr()
        for expert in range(3):
            matrix = PiperNVFP4Tensor.from_hp(source[expert], per_tensor_scale=level[expert, 0, 0])
            assert torch.equal(weight.dequantize()[expert], matrix.dequantize())
        with pytest.raises(NotImplementedError, match="matrices only"):
            weight.transpose(-2, -1)
        with pytest.raises(NotImplementedError, match="2-D weight"):
            torch.nn.functional.linear(torch.zeros(2, 32), weight)
        with pytest.raises(NotImplementedError, match="untransposed 2-D weight"):
            weight.add_(source)
    foreign = NVFP4Tensor(
        weight.qdata.transpose(-2, -1), weight.scale.transpose(-2, -1), 16, torch.float32, level
    )
    wrapped = PiperNVFP4Tensor.from_torchao(foreign)
    assert (wrapped.shape, wrapped.stride()) == ((3, 32, 128), (4096, 1, 32))
    wrapped.is_swizzled_scales = True
    assert torch.equal(wrapped.dequantize().mT, weight.dequantize())


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(make_weight, rows):
    if rows == 0 and make_weight().per_tensor_scale is not None:
        # There is no amax to read, but a weight without rows must still convert.
        assert make_weight(0).per_tensor_scale.item() == 2.0**-120
    weight = make_weight(rows)
    assert weight.dequantize().shape == (rows, 64)
    assert weight.t().shape == (64, rows)
    assert weight.t().t().shape == (rows, 64)
    assert torch.equal(weight.t().dequantize(), weight.dequantize().t())


def test_from_torchao_shares_storage():
    kwargs = QuantizeTensorToNVFP4Kwargs(is_swizzled_scales=True)
    foreign = NVFP4Tensor.to_nvfp4(
        dense(),
        per_tensor_scale=torch.tensor(0.01),
        act_per_tensor_scale=torch.tensor(0.5),
        is_swizzled_scales=True,
        act_quant_kwargs=kwargs,
    )
    weight = PiperNVFP4Tensor.from_torchao(foreign)
    for name in ("qdata", "scale", "per_tensor_scale", "act_per_tensor_scale"):
        assert getattr(weight, name) is getattr(foreign, name)
    assert weight.act_quant_kwargs is kwargs
    assert weight.is_swizzled_scales
    assert not weight.high_first
    assert torch.equal(weight.dequantize(), foreign.dequantize())
    assert PiperNVFP4Tensor.from_torchao(weight) is weight
    foreign.high_first = True
    assert PiperNVFP4Tensor.from_torchao(foreign).high_first


def test_from_torchao_reads_transposed_weights():
    foreign = NVFP4Tensor.to_nvfp4(dense())
    weight = PiperNVFP4Tensor.from_torchao(foreign.t())
    assert weight.transposed
    assert weight.stride() == (1, 64)
    assert torch.equal(weight.t().dequantize(), foreign.dequantize())


def test_from_torchao_needs_nvfp4():
    with pytest.raises(TypeError, match="from_torchao needs an NVFP4Tensor, got Tensor"):
        PiperNVFP4Tensor.from_torchao(torch.zeros(2, 32))


QDATA, SCALE = torch.zeros(4, 16, dtype=torch.uint8), torch.ones(4, 2).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_high_first_type(value):
    with pytest.raises(TypeError, match="high_first must be bool"):
        PiperNVFP4Tensor(QDATA, SCALE, 16, torch.float32, high_first=value)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((QDATA[0], SCALE, 16, torch.float32), "qdata must have shape"),
        ((QDATA, SCALE, 16, torch.float64), "logical dtype must be"),
        ((QDATA, SCALE.to("meta"), 16, torch.float32), "qdata and scale must share a device"),
        ((QDATA, SCALE, 16, torch.float32, torch.ones(1)), "per_tensor_scale must be a scalar"),
        (
            (QDATA, SCALE, 16, torch.float32, torch.ones((), device="meta")),
            "qdata and per_tensor_scale must share a device",
        ),
    ],
)
def test_constructor_refusals(arguments, match):
    with pytest.raises(ValueError, match=match):
        PiperNVFP4Tensor(*arguments)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((QDATA, SCALE, 32, torch.float32), "block_size must be 16"),
        ((QDATA.to(torch.int8), SCALE, 16, torch.float32), "qdata must be uint8"),
        ((QDATA, SCALE.float(), 16, torch.float32), "scale float8_e4m3fn"),
        ((QDATA, SCALE[:2], 16, torch.float32), r"scale must have shape \(4, 2\)"),
        (
            (QDATA, SCALE, 16, torch.float32, None, None, True),
            r"scale must have shape \(32, 16\)",
        ),
    ],
)
def test_storage_is_checked_on_use(arguments, match):
    weight = PiperNVFP4Tensor(*arguments)
    for use in (weight.dequantize, weight.get_hp_scales):
        with pytest.raises(ValueError, match=match):
            use()
    with pytest.raises(ValueError, match=match):
        torch.nn.functional.linear(torch.zeros(1, 32), weight)


def test_dequantize_refuses_other_dtypes(weight):
    with pytest.raises(ValueError, match="logical dtype must be"):
        weight.dequantize(torch.float64)


def test_meta_storage(make_weight):
    weight = make_weight().to("meta")
    names = weight.__tensor_flatten__()[0]
    assert all(getattr(weight, name).device.type == "meta" for name in names)
    assert weight.dequantize().shape == (7, 64)
    assert weight.get_hp_scales().shape == (7, 4)


def test_flatten_round_trip(make_weight):
    act = torch.tensor(0.25)
    weight = make_weight(act_per_tensor_scale=act)
    names, metadata = weight.__tensor_flatten__()
    level = ["per_tensor_scale"] if weight.per_tensor_scale is not None else []
    assert names == ["qdata", "scale", *level, "act_per_tensor_scale"]
    group = {"group_size": 16} if hasattr(weight, "group_size") else {}
    assert metadata == {
        "block_size": 16,
        "orig_dtype": torch.float32,
        **group,
        "is_swizzled_scales": weight.is_swizzled_scales,
        "use_triton_kernel": False,
        "act_quant_kwargs": None,
        "high_first": weight.high_first,
    }
    inner = {name: getattr(weight, name) for name in names}
    again = type(weight).__tensor_unflatten__(inner, metadata, weight.shape, weight.stride())
    assert again.qdata is weight.qdata
    assert again.act_per_tensor_scale is act
    assert torch.equal(again.dequantize(), weight.dequantize())


def test_deepcopy_and_clone_own_their_storage(make_weight):
    weight = make_weight(act_per_tensor_scale=torch.tensor(0.5))
    for source in (weight, weight.t()):
        for duplicate in (copy.deepcopy(source), source.clone()):
            assert type(duplicate) is type(weight)
            assert duplicate.transposed == source.transposed
            assert torch.equal(duplicate.dequantize(), source.dequantize())
            for name in weight.__tensor_flatten__()[0]:
                assert getattr(duplicate, name).data_ptr() != getattr(weight, name).data_ptr()


def test_stable_hash_describes_metadata_only(plain):
    weight = plain()
    zeroed = plain()
    zeroed.qdata.zero_()
    assert weight._stable_hash_for_caching() == zeroed._stable_hash_for_caching()
    different = [
        weight,
        weight.t(),
        plain(9),
        plain(dtype=torch.float16),
        plain(swizzled=True),
        plain(two_level=False),
        plain(high_first=True),
        plain(act_quant_kwargs=QuantizeTensorToNVFP4Kwargs()),
        plain(name="convrot"),
        plain(name="convrot", group_size=64),
    ]
    hashes = {w._stable_hash_for_caching() for w in different}
    assert len(hashes) == len(different)


def test_static_weights_bypass_the_disk_cache(plain):
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache

    with pytest.raises(BypassAOTAutogradCache, match="static input scale"):
        plain(act_per_tensor_scale=torch.tensor(0.5))._stable_hash_for_caching()
