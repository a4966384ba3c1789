"""Numeric checks of the GGUF to NVFP4 kernels against the portable conversion.

Run as a script with ``TRITON_INTERPRET=1``, or with ``cuda`` as its argument on a GPU.
"""

import importlib.util
import sys
from itertools import product
from pathlib import Path

import torch

from piper_kernels._triton.targets import AcceleratorTarget
from piper_kernels.gguf import GGUF_QUANT_SIZES, GGUFQuantizationType, dequantize
from piper_kernels.weights.convrot._rotation import rotate_groups
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor, _gguf, gguf_triton
from piper_kernels.weights.nvfp4._encoding import decode, encode, per_tensor_scale_of
from piper_kernels.weights.nvfp4._layout import scale_shape, swap_packed_pairs, unswizzle_scale

DEVICE = sys.argv[1] if sys.argv[1:] == ["cuda"] else "cpu"
NATIVE = DEVICE == "cuda" and torch.cuda.get_device_capability() >= (10, 0)
TYPES = list(GGUFQuantizationType)


def load_packed_data():
    path = Path(__file__).parents[3] / "gguf" / "packed_data.py"
    spec = importlib.util.spec_from_file_location("packed_data", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def convert(packed, kind, group, features, *, level, compute, swizzled, high_first):
    """Return ``(qdata, plain scales, global scale)`` of the kernels, on the CPU."""
    rows = packed.shape[0]
    qdata = torch.full((rows + 1, features // 2), 0x99, dtype=torch.uint8, device=DEVICE)
    shape = scale_shape(rows, features, swizzled=swizzled)
    scale = torch.zeros(shape, dtype=torch.uint8, device=DEVICE)
    gguf_triton.convert(
        packed.to(DEVICE),
        qdata[:rows],
        scale.view(-1),
        None if level is None else level.to(DEVICE),
        quant_type=kind,
        group_size=group,
        compute_per_tensor_scale=compute,
        swizzled=swizzled,
        high_first=high_first,
        native=NATIVE,
    )
    assert (qdata[rows:] == 0x99).all()
    scale = scale.cpu()
    if swizzled:
        plain = unswizzle_scale(scale, rows, features // 16)
        # What the round trip does not see is padding: it must still be zero.
        assert int((scale != 0).sum()) == int((plain != 0).sum())
        scale = plain
    qdata = qdata[:rows].cpu()
    return swap_packed_pairs(qdata) if high_first else qdata, scale


def check(packed, kind, group, features, mode="none", *, swizzled=False, high_first=False):
    rotated = rotate_groups(dequantize(packed, kind), group)
    level = {
        "none": None,
        "given": torch.tensor(0.003),
        "computed": per_tensor_scale_of(rotated.abs().amax()),
    }[mode]
    codes, scale = encode(rotated, level)
    compute = mode == "computed"
    stored = torch.tensor(torch.nan, device=DEVICE) if compute else level
    actual, actual_scale = convert(
        packed, kind, group, features,
        level=stored, compute=compute, swizzled=swizzled, high_first=high_first,
    )  # fmt: skip
    if compute:
        torch.testing.assert_close(stored.cpu(), level, rtol=2e-6, atol=0)
    label = (kind.name, group, mode, swizzled, high_first)
    steps = (actual_scale.int() - scale.view(torch.uint8).int()).abs()
    assert steps.max() <= 1, label
    assert (steps != 0).float().mean() < 0.02, label
    # The unpacked codes of both, in blocks whose scale is the same.
    same = (steps == 0).unsqueeze(-1)
    unpacked = torch.stack((actual & 15, actual >> 4), dim=-1).flatten(-2)
    sizes = (scale.shape[1], 16)
    distance = ((unpacked & 7).int() - (codes & 7).int()).abs().unflatten(-1, sizes)
    assert (distance * same).max() <= 1, label
    assert ((distance != 0) & same).float().mean() < 0.005, label
    nonzero = ((unpacked & 7) > 0) & ((codes & 7) > 0)
    assert torch.equal((unpacked >> 3)[nonzero], (codes >> 3)[nonzero]), label
    restored = decode(actual, actual_scale.view(torch.float8_e4m3fn).float())
    factor = 1.0 if level is None else level
    assert (restored * factor - rotated).norm() / rotated.norm() < 0.15, label


def check_types(packed_data):
    for index, kind in enumerate(TYPES):
        group = (16, 64, 256)[index % 3]
        features = 768 if max(GGUF_QUANT_SIZES[kind][0], group) == 256 else 320
        packed = packed_data.finite_packed(kind, 3, features)
        check(packed, kind, group, features, ("none", "computed")[index % 2])


def check_layouts(packed_data):
    kind = GGUFQuantizationType.Q8_0
    packed = packed_data.finite_packed(kind, 131, 96)
    modes = ("none", "given", "computed")
    for mode, swizzled, high_first in product(modes, (False, True), (False, True)):
        check(packed, kind, 16, 96, mode, swizzled=swizzled, high_first=high_first)
    wide = packed_data.finite_packed(kind, 2, 2 * 1024 + 64)
    check(wide, kind, 64, 2 * 1024 + 64, "computed", swizzled=True)


def check_edges():
    """Zero rows take the smallest block scale and code zero; NaN reaches the global scale."""
    dense = torch.zeros(2, 64)
    packed = dense.view(torch.uint8)
    kind = GGUFQuantizationType.F32
    options = {"compute": True, "swizzled": False, "high_first": False}
    level = torch.tensor(torch.nan, device=DEVICE)
    qdata, scale = convert(packed, kind, 64, 64, level=level, **options)
    assert (qdata & 0x77).sum() == 0
    assert (scale == 8).all()
    assert level == 2.0**-120
    dense[1, 3] = torch.nan
    level = torch.tensor(0.0, device=DEVICE)
    convert(packed, kind, 64, 64, level=level, **options)
    assert level.isnan()


def check_entry_points(packed_data):
    """The methods of the weight reach the kernels; elsewhere than on a GPU they are made to."""
    if DEVICE == "cpu":
        target = AcceleratorTarget("cuda", "sm_90")
        _gguf.support = lambda device: (True, "")
        _gguf.accelerator_target = lambda device: target
    first, second = (packed_data.finite_packed(1, 130, 96, s, device=DEVICE) for s in (0, 1))
    options = {"quant_type": 1, "compute_per_tensor_scale": True}
    weight = ConvRotNVFP4Tensor.from_gguf(first, group_size=16, is_swizzled_scales=True, **options)
    inner = (weight.qdata, weight.scale, weight.per_tensor_scale)
    versions = [tensor._version for tensor in inner]
    assert weight.copy_from_gguf_(second, **options) is weight
    after = (weight.qdata, weight.scale, weight.per_tensor_scale)
    assert all(new is old for new, old in zip(after, inner, strict=True))
    assert all(tensor._version > old for tensor, old in zip(inner, versions, strict=True))
    dense = dequantize(second.cpu(), 1)
    expected = ConvRotNVFP4Tensor.from_hp(
        dense, group_size=16, is_swizzled_scales=True, compute_per_tensor_scale=True
    )
    differing = weight.qdata.cpu() != expected.qdata
    assert differing.float().mean() < 0.005
    restored = weight.to("cpu").dequantize(torch.float32)
    assert (restored - dense).norm() / dense.norm() < 0.15


if __name__ == "__main__":
    blocks = load_packed_data()
    check_types(blocks)
    check_layouts(blocks)
    check_edges()
    check_entry_points(blocks)
    print("gguf nvfp4 checks passed")
