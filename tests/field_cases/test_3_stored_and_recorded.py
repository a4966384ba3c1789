"""Codes that were stored and graphs that were recorded."""

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from phyai.models.pi05.captured import CapturedDenoise
from phyai.models.pi05.loading import load_pi05
from phyai.processing import ModelInputs
from phyai.runtime.graphs import CapturedLoop
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor

from .attention_values import engine_row, error, exact, operands


def test_case_59_strided_codes_and_scales_are_read_where_they_lie():
    """Codes and scales that are views of packed rows give what dense ones give.

    Handled in piper_kernels.weights.convrot.int8, piper_kernels.weights.nvfp4.
    """
    dense = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    weight = ConvRotInt8Tensor.from_hp(dense, group_size=16)
    rows = torch.zeros(64, 64 + 4 + 8, dtype=torch.int8)
    rows[:, :64], rows[:, 64:68] = weight.qdata, weight.scale.view(torch.int8)
    codes, scale = rows[:, :64], rows[:, 64:68].view(torch.float32)
    assert not scale.is_contiguous()
    packed = ConvRotInt8Tensor.from_quantized(
        codes, scale, group_size=16, logical_dtype=torch.float32
    )
    assert torch.equal(functional.linear(x, packed), functional.linear(x, weight))
    fp4 = PiperNVFP4Tensor.from_hp(dense)
    rows = torch.zeros(64, 32 + 4, dtype=torch.uint8)
    rows[:, :32], rows[:, 32:] = fp4.qdata, fp4.scale.view(torch.uint8)
    packed = PiperNVFP4Tensor(
        rows[:, :32],
        rows[:, 32:].view(torch.float8_e4m3fn),
        block_size=16,
        orig_dtype=torch.float32,
    )
    assert not packed.qdata.is_contiguous()
    assert torch.equal(packed.dequantize(), fp4.dequantize())
    assert torch.equal(functional.linear(x, packed), functional.linear(x, fp4))


def test_case_59_prepared_attention_refuses_views_that_are_not_dense():
    """Prepared codes and scales of attention must be dense; the error names the one that is not.

    Handled in piper_kernels.attention.piper_attention.
    """
    from piper_kernels.attention.piper_attention import prepared

    query, key, value = operands(2, 2, 64, 64)
    stored = prepared.prepare(query, key, value, scale=0.125, padded=True)
    kv = stored.key_value
    given = [stored.query_codes, stored.query_scale, kv.key_codes, kv.key_scale, kv.value_codes]
    given += [kv.value_multiplier, kv.value_log_scale, kv.value_mean, 64, 64, False, torch.float16]
    attend = torch.ops.piper_kernels.piper_attention_from_quantized
    assert error(attend(*given), exact(query, key, value)) < 0.05
    for index, name in enumerate(("query", "query_scale", "key", "key_scale", "value")):
        tensor = given[index]
        wide = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 8)
        wide[..., : tensor.shape[-1]] = tensor
        changed = [*given]
        changed[index] = wide[..., : tensor.shape[-1]]
        with pytest.raises(ValueError, match=f"prepared {name} must be contiguous"):
            attend(*changed)


def test_case_65_a_graph_refuses_other_lengths(recorded):
    """A graph recorded for 64 keys refuses 900 and says what to do.

    Handled in phyai.runtime.graphs.
    """
    query, short, long = (torch.randn(2, n, 4, 8) for n in (1, 64, 900))
    run = engine_row("eager.attention")
    loop = CapturedLoop(lambda q, k: run(q, k, k, scale=0.3), [query, short])
    assert torch.equal(loop(query, short), run(query, short, short, scale=0.3))
    with pytest.raises(ValueError, match=r"\[2, 900, 4, 8\]; record another graph"):
        loop(query, long)


def test_case_65_a_recorded_policy_refuses_another_prefix(recorded, tiny_pi05):
    """A recorded action loop refuses a prefix of other lengths instead of replaying its old plan.

    Handled in phyai.models.pi05.captured.
    """
    cases = load_file(tiny_pi05 / "cases.safetensors")
    model = load_pi05(tiny_pi05, device="cpu", params_dtype=torch.float32)

    def prefix(group):
        images, mask = cases[f"{group}.images"].float() / 127.5 - 1, cases[f"{group}.image_mask"]
        tokens, token_mask = cases[f"{group}.tokens"], cases[f"{group}.token_mask"]
        texts = ("",) * len(mask)
        return model.encode_prefix(ModelInputs(images, mask, tokens, token_mask, None, texts))

    with torch.inference_mode():
        loop = CapturedDenoise(model, *prefix("single"))
        found = loop(*prefix("single"), cases["single.noise"])
        torch.testing.assert_close(found, cases["single.actions_10"], atol=1e-5, rtol=0)
        with pytest.raises(ValueError, match="record another graph for this layout"):
            loop(*prefix("ragged"), cases["ragged.noise"])
