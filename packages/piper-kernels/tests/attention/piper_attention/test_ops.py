"""The operators: compilation, prepared operands, and the choice of a backend."""

import pytest
import torch
from attention_oracle import exact_attention, random_operands, sqnr
from torch._dynamo.testing import CompileCounterWithBackend

from piper_kernels import piper_attention
from piper_kernels._triton.targets import AcceleratorTarget
from piper_kernels.attention._backends import AttentionRequest, select_backend
from piper_kernels.attention._quantization import Granularity
from piper_kernels.attention.piper_attention import _backend, prepared

ops = torch.ops.piper_kernels
causal = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


OPCHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


@causal
def test_operators_keep_their_contract(is_causal):
    rows = 130 if is_causal else 70
    query, key, value = random_operands(1, 4, 2, rows, 130, 64)
    stored = prepared.prepare(query, key, value, scale=0.125, is_causal=is_causal, padded=True)
    codes = (stored.query_codes, stored.query_scale)
    quantized = quantized_arguments(rows, is_causal=is_causal)
    every_second = [x[:, :, ::2] for x in (query, key, value)]
    for name, arguments in (
        ("piper_attention", (query, key, value, 0.125, is_causal)),
        ("piper_attention", (*every_second, 0.125, is_causal)),
        ("piper_attention_from_quantized_query", (*codes, key, value, rows, is_causal)),
        ("piper_attention_from_quantized", tuple(quantized.values())),
    ):
        torch.library.opcheck(getattr(ops, name).default, arguments, test_utils=OPCHECKS)


@causal
def test_one_graph_serves_all_lengths_and_strides(is_causal):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def negated(query, key, value):
        return -piper_attention(query, key, value, is_causal=is_causal)

    compiled = torch.compile(negated, backend=counter, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for rows in (65, 130, 193):
            operands = random_operands(3, 4, 2, rows, rows, 64, seed=rows)
            permuted = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in operands]
            assert torch.equal(compiled(*permuted), negated(*operands))
    assert counter.frame_count == 1


def test_inductor_runs_the_operator():
    torch._dynamo.reset()
    operands = random_operands(1, 2, 1, 65, 65, 64)
    with torch.no_grad():
        compiled = torch.compile(lambda *x: piper_attention(*x) * 2, fullgraph=True)
        assert torch.equal(compiled(*operands), piper_attention(*operands) * 2)


@causal
def test_prepared_operands_give_the_attention(is_causal):
    query, key, value = random_operands(2, 4, 2, 70, 70, 64)
    stored = prepared.prepare(query, key, value, scale=0.125, is_causal=is_causal, padded=True)
    kv = stored.key_value
    mean = torch.full((2, 2, 64), float("nan")) if is_causal else kv.value_mean
    from_both = ops.piper_attention_from_quantized(
        stored.query_codes, stored.query_scale, kv.key_codes, kv.key_scale, kv.value_codes,
        kv.value_multiplier, kv.value_log_scale, mean, 70, 70, is_causal, torch.float16,
    )  # fmt: skip
    from_query = ops.piper_attention_from_quantized_query(
        stored.query_codes, stored.query_scale, key, value, 70, is_causal
    )
    assert torch.equal(from_both, from_query)
    assert from_both.shape == query.shape
    assert sqnr(from_both, exact_attention(query, key, value, is_causal=is_causal)) > 34


def test_values_that_share_a_scale_within_64_keys():
    """One multiplier for 64 keys is the same as 64 equal ones, and refused under a mask."""
    given = quantized_arguments()
    for name in ("multiplier", "log_scale"):
        given[name] = given[name].unflatten(2, (-1, 64)).amax(3)
    output = ops.piper_attention_from_quantized(**given)
    repeated = {name: given[name].repeat_interleave(64, 2) for name in ("multiplier", "log_scale")}
    assert torch.equal(output, ops.piper_attention_from_quantized(**given | repeated))
    with pytest.raises(ValueError, match="a multiplier for each of 192 keys, got one for 64"):
        ops.piper_attention_from_quantized(
            **quantized_arguments(130) | {"multiplier": given["multiplier"], "is_causal": True}
        )


def quantized_arguments(rows=70, **changes):
    query, key, value = random_operands(1, 4, 2, rows, 130, 64)
    stored = prepared.prepare(query, key, value, scale=0.125, padded=True)
    kv = stored.key_value
    arguments = {
        "query": stored.query_codes,
        "query_scale": stored.query_scale,
        "key": kv.key_codes,
        "key_scale": kv.key_scale,
        "value": kv.value_codes,
        "multiplier": kv.value_multiplier,
        "log_scale": kv.value_log_scale,
        "value_mean": kv.value_mean,
        "query_length": rows,
        "key_length": 130,
        "is_causal": False,
        "output_dtype": torch.bfloat16,
    }
    return arguments | {
        name: change(arguments[name]) if callable(change) else change
        for name, change in changes.items()
    }


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("prepared query must be int8", {"query": lambda x: x.short()}),
        ("must be stored in 64", {"query_length": 64}),
        ("prepared query_scale must be contiguous", {"query_scale": lambda x: x[..., :3]}),
        ("prepared key must be contiguous", {"key": lambda x: x[:, :, :64]}),
        ("divides the query head count", {"key": lambda x: x.repeat(1, 2, 1, 1)[:, :3]}),
        ("prepared key_scale", {"key_scale": lambda x: x.half()}),
        ("prepared value must be contiguous", {"value": lambda x: x.mT.contiguous().mT}),
        ("prepared multiplier", {"multiplier": lambda x: x[..., :130]}),
        ("prepared log_scale", {"log_scale": lambda x: x.to("meta")}),
        ("prepared log_scale", {"log_scale": lambda x: x[..., ::64].contiguous()}),
        ("prepared value_mean", {"value_mean": lambda x: x[..., :1]}),
        ("does not accept empty", {"key_length": 0}),
        ("equal query and key lengths", {"is_causal": True}),
    ],
)
def test_prepared_operands_that_do_not_fit_are_refused(message, changes):
    ops.piper_attention_from_quantized(**quantized_arguments())
    with pytest.raises(ValueError, match=message):
        ops.piper_attention_from_quantized(**quantized_arguments(**changes))


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("float16 or bfloat16", lambda key, value: (key.float(), value.float())),
        ("share a dtype and the shape", lambda key, value: (key, value[:, :, :9])),
        ("share a dtype and the shape", lambda key, value: (key, value.bfloat16())),
        ("share a device", lambda key, value: (key.to("meta"), value)),
        ("divides the query head count", lambda key, value: (key[:, :0], value[:, :0])),
        ("does not accept empty", lambda key, value: (key[:, :, :0], value[:, :, :0])),
    ],
)
def test_floating_keys_that_do_not_fit_a_prepared_query_are_refused(message, change):
    query, key, value = random_operands(1, 4, 2, 70, 130, 64)
    codes = prepared.prepare_query(
        query, scale=0.125, granularity=Granularity.PER_WARP, padded=True
    )
    with pytest.raises(ValueError, match=message):
        ops.piper_attention_from_quantized_query(*codes, *change(key, value), 70, False)


class OneHead:
    """A backend that supports one head dimension and answers with ones."""

    name = "one"

    def support(self, request, /):
        usable = request.head_dim == 64
        return usable, "" if usable else f"needs head_dim 64, got {request.head_dim}"

    def attention(self, query, key, value, scale, is_causal):
        return torch.ones_like(query)


def test_a_backend_in_front_is_asked_first(monkeypatch):
    monkeypatch.setattr(_backend, "BACKENDS", (OneHead(), *_backend.BACKENDS))
    for head_dim, is_ones in ((64, True), (128, False)):
        operands = random_operands(1, 1, 1, 9, 9, head_dim)
        assert bool((piper_attention(*operands) == 1).all()) == is_ones


def test_reasons_are_told_where_no_backend_is_left():
    request = AttentionRequest(AcceleratorTarget("cuda", "sm_90"), 128, True)
    with pytest.raises(RuntimeError, match=r"sm_90.*one: needs head_dim 64, got 128"):
        select_backend((OneHead(),), request)


def test_the_portable_backend_supports_every_target():
    portable = _backend.BACKENDS[-1]
    for target in (None, AcceleratorTarget("cuda", "sm_75"), AcceleratorTarget("hip", "gfx1100")):
        request = AttentionRequest(target, 128, is_causal=True)
        assert select_backend(_backend.BACKENDS, request) is portable
        assert portable.name == "portable"
