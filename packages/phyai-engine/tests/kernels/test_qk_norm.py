"""The reference of the fused query/key norm, against the operations that it joins."""

import pytest
import torch

from phyai.dispatch.catalog import build_catalog
from phyai.dispatch.facts import Facts


def prepared(kernel_id, **facts):
    impl = build_catalog().impl(kernel_id)
    return impl.prepare(Facts({"op": impl.op, **facts}), {})


@pytest.mark.parametrize("variant", ["rms", "rms_cast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_norm_then_rotation_then_storing(variant, dtype):
    generator = torch.Generator().manual_seed(0)
    tokens, heads, kv_heads, width = 5, 4, 2, 16
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * width, generator=generator).to(dtype)
    weight_q, weight_k = torch.rand(2, width, generator=generator).to(dtype) + 0.5
    angles = torch.randn(tokens, width // 2, generator=generator) * 9
    rotation = torch.cat((angles.cos(), angles.sin()), 1)
    keys, values = torch.full((2, 9, kv_heads, width), torch.nan, dtype=dtype)
    slots = torch.tensor([8, 1, 2, 6, 0])
    fused = prepared("torch.qk_norm_rope_append", **{"attrs.variant": variant})
    query = fused(qkv, weight_q, weight_k, rotation, slots, keys, values, 1e-6)

    def norm(x, weight):
        wide = torch.nn.functional.rms_norm(x.float(), (width,), eps=1e-6)
        if variant == "rms_cast":
            return wide.to(dtype) * weight
        return wide * weight.float()

    q, k, v = qkv.view(tokens, -1, width).split((heads, kv_heads, kv_heads), 1)
    rotate = prepared("eager.rope", **{"attrs.interleave": False})
    expected = rotate(torch.arange(tokens), norm(q, weight_q), norm(k, weight_k), rotation)
    step = 2e-2 if dtype == torch.bfloat16 else 1e-5
    bound = {"rtol": step, "atol": step}
    torch.testing.assert_close(query, expected[0].to(dtype), **bound)
    torch.testing.assert_close(keys[slots], expected[1].to(dtype), **bound)
    assert torch.equal(values[slots], v)
    unused = [3, 4, 5, 7]
    assert keys[unused].isnan().all()
    assert values[unused].isnan().all()


def test_variants_differ_by_rounding_only():
    qkv = torch.randn(3, 4 * 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight = torch.rand(16, generator=torch.Generator().manual_seed(2)).bfloat16() + 0.5
    rotation = torch.cat((torch.ones(3, 8), torch.zeros(3, 8)), 1)
    outs = []
    for variant in ("rms", "rms_cast"):
        keys, values = torch.zeros(2, 3, 1, 16, dtype=torch.bfloat16)
        fused = prepared("torch.qk_norm_rope_append", **{"attrs.variant": variant})
        outs.append(fused(qkv, weight, weight, rotation, torch.arange(3), keys, values, 1e-6))
    assert not torch.equal(*outs)
    torch.testing.assert_close(*outs, rtol=2e-2, atol=2e-2)
