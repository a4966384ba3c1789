"""Numeric checks of the GGUF kernels against the portable conversion.

Run as a script with ``TRITON_INTERPRET=1``, or with ``cuda`` as its argument on a GPU.
"""

import importlib.util
import sys
from pathlib import Path

import torch
import triton
import triton.language as tl

from piper_kernels._triton.row_chunks import RowChunks
from piper_kernels._triton.targets import AcceleratorTarget
from piper_kernels.gguf import GGUF_QUANT_SIZES, GGUFQuantizationType, dequantize
from piper_kernels.gguf.triton import decode_units
from piper_kernels.weights.convrot._rotation import rotate_groups
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor, _gguf, gguf_triton
from piper_kernels.weights.convrot.int8._gguf_policy import TiledRows
from piper_kernels.weights.convrot.int8._quantization import dynamic_quantize_rows

DEVICE = sys.argv[1] if sys.argv[1:] == ["cuda"] else "cpu"
TYPES = list(GGUFQuantizationType)


def load_packed_data():
    path = Path(__file__).parents[3] / "gguf" / "packed_data.py"
    spec = importlib.util.spec_from_file_location("packed_data", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@triton.jit
def decode_kernel(data, out, units, UNITS: tl.constexpr, TYPE: tl.constexpr):
    unit = tl.arange(0, UNITS).to(tl.int64)
    values = decode_units(data, unit, unit < units, TYPE)
    tl.store(out + unit[:, None] * 16 + tl.arange(0, 16)[None, :], values)


@triton.jit
def decode_every_type_kernel(data, out, units, UNITS: tl.constexpr, TYPE_BITS: tl.constexpr):
    unit = tl.arange(0, UNITS).to(tl.int64)
    for i in tl.static_range(0, 31):
        if (TYPE_BITS >> i) & 1:
            values = decode_units(data, unit, unit < units, i)
            offsets = (unit + i * UNITS)[:, None] * 16 + tl.arange(0, 16)[None, :]
            tl.store(out + offsets, values)


def check_decode(packed_data):
    for kind in TYPES:
        packed = packed_data.finite_packed(kind, 1, 768)
        out = torch.full((64, 16), torch.nan, device=DEVICE)
        decode_kernel[(1,)](packed.to(DEVICE), out, 48, UNITS=64, TYPE=int(kind))
        expected = dequantize(packed, kind).view(48, 16)
        # A fused multiply-add rounds the affine types once instead of twice.
        torch.testing.assert_close(out[:48].cpu(), expected, rtol=3e-7, atol=1e-7)
        assert out[48:].abs().sum() == 0, kind


def check(packed, kind, group, plan, features):
    rows = packed.shape[0]
    rotated = rotate_groups(dequantize(packed, kind), group)
    codes, scale = dynamic_quantize_rows(rotated)
    # One row of guard elements catches writes past the end.
    qdata = torch.full((rows + 1, features), 99, dtype=torch.int8, device=DEVICE)
    row_scale = torch.full((rows + 1, 1), torch.nan, device=DEVICE)
    gguf_triton.convert(
        packed.to(DEVICE),
        qdata[:rows],
        row_scale[:rows],
        quant_type=kind,
        group_size=group,
        plan=plan,
    )
    torch.testing.assert_close(row_scale[:rows].cpu(), scale, rtol=2e-6, atol=0)
    assert (qdata[:rows].cpu().int() - codes.int()).abs().max() <= 1, (kind, group, plan)
    assert (qdata[:rows].cpu() != codes).float().mean() < 0.01, (kind, group, plan)
    assert (qdata[rows:] == 99).all()
    assert row_scale[rows:].isnan().all()


def check_types(packed_data):
    for kind in TYPES:
        block = GGUF_QUANT_SIZES[kind][0]
        group = (16, 64, 256)[int(kind) % 3]
        features = 768 if max(block, group) == 256 else 320
        packed = packed_data.finite_packed(kind, 3, features)
        fused = RowChunks(2, 1 << (features - 1).bit_length(), 1, 4)
        check(packed, kind, group, fused, features)
        check(packed, kind, group, TiledRows(256, -(-features // 256), 4), features)


def check_schedules(packed_data):
    kind = GGUFQuantizationType.Q8_0
    for features, plan in [
        (32, RowChunks(4, 32, 1, 4)),
        (160, RowChunks(1, 64, 3, 4)),
        (224, RowChunks(2, 128, 2, 4)),
        (192, RowChunks(1, 64, 3, 4)),
        (96, TiledRows(32, 3, 4)),
    ]:
        packed = packed_data.finite_packed(kind, 5, features)
        check(packed, kind, 16, plan, features)


def check_edges():
    """Zero rows take the smallest scale; huge rows stay finite; NaN keeps to its row."""
    dense = torch.zeros(4, 128)
    dense[1] = torch.linspace(-4e37, 4e37, 128)
    dense[2, 5] = torch.nan
    dense[3] = 1e-38
    for plan in (RowChunks(4, 128, 1, 4), TiledRows(64, 2, 4)):
        qdata = torch.full((4, 128), 99, dtype=torch.int8, device=DEVICE)
        scale = torch.full((4, 1), torch.nan, device=DEVICE)
        packed = dense.view(torch.uint8).to(DEVICE)
        gguf_triton.convert(packed, qdata, scale, quant_type=0, group_size=64, plan=plan)
        assert scale[0] == torch.tensor(1e-30)
        assert qdata[0].abs().sum() == 0
        assert scale[1].isfinite()
        assert qdata[1].abs().max() == 127
        assert scale[2].isnan()
        assert scale[3] == torch.tensor(1e-30)


def check_passes(packed_data):
    """Several passes of a small workspace give the codes of one pass."""
    kind = GGUFQuantizationType.Q4_0
    packed = packed_data.finite_packed(kind, 5, 128)

    class SmallWorkspace(TiledRows):
        rows_per_pass = 2

    check(packed, kind, 64, SmallWorkspace(64, 2, 4), 128)


def check_entry_points(packed_data):
    """The methods of the weight reach the kernels; elsewhere than on a GPU it is made to."""
    if DEVICE == "cpu":
        target = AcceleratorTarget("cuda", "sm_90")
        _gguf.support = lambda device: (True, "")
        _gguf.accelerator_target = lambda device: target
    for features in (96, 4112):
        first, second = (
            packed_data.finite_packed(1, 3, features, seed, device=DEVICE) for seed in (0, 1)
        )
        weight = ConvRotInt8Tensor.from_gguf(first, quant_type=1, group_size=16)
        version = weight.qdata._version, weight.scale._version
        assert weight.copy_from_gguf_(second, quant_type=1) is weight
        assert weight.qdata._version > version[0]
        assert weight.scale._version > version[1]
        expected = ConvRotInt8Tensor.from_hp(dequantize(second.cpu(), 1), group_size=16)
        torch.testing.assert_close(weight.scale.cpu(), expected.scale, rtol=2e-6, atol=0)
        assert (weight.qdata.cpu().int() - expected.qdata.int()).abs().max() <= 1
    # Bytes cut at an odd address are copied before 16-bit words are read from them.
    blob = torch.zeros(second.numel() + 1, dtype=torch.uint8, device=DEVICE)
    blob[1:] = second.flatten()
    odd = ConvRotInt8Tensor.from_gguf(blob[1:].view(3, -1), quant_type=1, group_size=16)
    assert torch.equal(odd.qdata, weight.qdata)


if __name__ == "__main__":
    blocks = load_packed_data()
    check_decode(blocks)
    check_types(blocks)
    check_schedules(blocks)
    check_edges()
    check_passes(blocks)
    check_entry_points(blocks)
    print("gguf checks passed")
