"""Metadata that the projection operators refuse, eager and under fake tensors."""

import pytest
import torch
from projection_operands import operands
from torch._subclasses.fake_tensor import FakeTensorMode

from piper_kernels.fusions.convrot_int8_piper import _ops as dense
from piper_kernels.fusions.convrot_int8_sparse_piper import _ops as sparse
from piper_kernels.fusions.convrot_int8_sparse_piper import _ops_value as sparse_value

ROWS = 70


def arguments():
    case = operands(ROWS, features=16, heads=2, head_dim=64, rotary=32)
    p, t = case.projection, case.transform
    return {
        "input_qdata": case.inputs.qdata,
        "input_scale": case.inputs.scale,
        "weight_qdata": p.qdata,
        "weight_scale": p.scale,
        "norm_weight": t.weight,
        "cos": t.cos,
        "sin": t.sin,
        "eps": t.eps,
        "softmax_scale": 0.1,
        "routing_mode": 0,
        "bias": p.bias,
    }


def replaced(name, change):
    given = arguments()
    given[name] = change(given[name])
    return given


BAD = {
    "rank of the input": ("input_qdata", lambda x: x[0], "batch, sequence, features"),
    "dtype of the input": ("input_qdata", lambda x: x.float(), "convrot_int8_prepare_input"),
    "strided input": ("input_qdata", lambda x: x.expand(2, -1, -1), "input_qdata must be contig"),
    "rows of the input": ("input_qdata", lambda x: x[:, :63], "at least 64 sequence rows, got 63"),
    "scales of the input": ("input_scale", lambda x: x[:, 1:], "input_scale must be contiguous"),
    "dtype of the weight": ("weight_qdata", lambda x: x.float(), "weight_qdata must be int8"),
    "width of the weight": ("weight_qdata", lambda x: x[:, 1:], r"\[heads \* head_dim, 16\]"),
    "part of a head": (
        "weight_qdata",
        lambda x: x[:100],
        "100 outputs of the weight must be whole",
    ),
    "flat weight scale": ("weight_scale", lambda x: x[:, 0], r"weight_scale must .* \(128, 1\)"),
    "dtype of weight scale": ("weight_scale", lambda x: x.half(), "weight_scale must be"),
    "width of the norm": (
        "norm_weight",
        lambda x: x[:48].contiguous(),
        "must be 64 or 128, got 48",
    ),
    "dtype of the norm": ("norm_weight", lambda x: x.int(), "norm_weight must be contiguous float"),
    "strided norm": ("norm_weight", lambda x: x.repeat(2)[::2], "norm_weight must be contiguous"),
    "no width of heads": ("norm_weight", lambda _: None, "pass head_dim where norm_weight is None"),
    "dtype of cosines": ("cos", lambda x: x.double(), "cos must be contiguous float32"),
    "strided sines": ("sin", lambda x: x.T.contiguous().T, "sin must be contiguous"),
    "rows of cosines": ("cos", lambda x: x[1:], "one row for each of 70 positions"),
    "width of sines": ("sin", lambda x: x[:, :16].contiguous(), "equal widths"),
    "epsilon": ("eps", lambda _: 0.0, "eps must be finite and positive, got 0"),
    "infinite epsilon": ("eps", lambda _: float("inf"), "eps must be finite"),
    "softmax scale": ("softmax_scale", lambda _: -1.0, "softmax_scale must be finite and positive"),
    "NaN softmax scale": ("softmax_scale", lambda _: float("nan"), "softmax_scale must be finite"),
    "routing": ("routing_mode", lambda _: 7, "7 is not a valid RoutingMode"),
    "length of the bias": ("bias", lambda x: x[1:], "bias must have shape"),
    "dtype of the bias": ("bias", lambda x: x.double(), "bias must be FP16, BF16, or FP32"),
}


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("name", BAD)
def test_query_operands_that_do_not_fit(name, fake):
    argument, change, message = BAD[name]
    given = replaced(argument, change)
    if not fake:
        with pytest.raises(ValueError, match=message):
            sparse.project_query(**given)
        return
    with FakeTensorMode() as mode:
        converted = {
            key: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            for key, value in given.items()
        }
        with pytest.raises(ValueError, match=message):
            sparse.project_query(**converted)


def test_rotary_widths():
    case = operands(ROWS, features=16, heads=1, head_dim=64, rotary=66)
    given = arguments() | {"cos": case.transform.cos, "sin": case.transform.sin}
    with pytest.raises(ValueError, match=r"even and in \[2, 64\], got 66"):
        sparse.project_query(**given)
    odd = {name: given[name][:, :33].contiguous() for name in ("cos", "sin")}
    with pytest.raises(ValueError, match="got 33"):
        sparse.project_query(**given | odd)


def test_widths_of_heads_that_disagree():
    with pytest.raises(ValueError, match="head_dim 128 does not fit norm_weight of 64"):
        sparse.project_query(**arguments(), head_dim=128)


def test_block_lengths():
    for lengths in (torch.ones(2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)):
        with pytest.raises(ValueError, match="block_lengths must be contiguous int32"):
            sparse.project_query(**arguments(), block_lengths=lengths)


def keys_of(given):
    return {name: x for name, x in given.items() if name != "softmax_scale"}


def test_keys_check_what_queries_check():
    with pytest.raises(ValueError, match="one row for each of 70 positions"):
        sparse.project_key(**keys_of(replaced("cos", lambda x: x[1:])))
    with pytest.raises(ValueError, match="weight_qdata must be int8"):
        sparse.project_key(**keys_of(replaced("weight_qdata", lambda x: x.float())))


def values(**changes):
    case = operands(ROWS, features=16, heads=2, head_dim=64)
    given = {
        "input_qdata": case.inputs.qdata,
        "input_scale": case.inputs.scale,
        "input_mean": case.input_mean,
        "weight_qdata": case.projection.qdata,
        "weight_scale": case.projection.scale,
        "head_dim": 64,
    }
    return given | changes


@pytest.mark.parametrize(
    "operator", [sparse_value.project_value, sparse_value.project_value_with_block_means]
)
def test_value_operands_that_do_not_fit(operator):
    mean = values()["input_mean"]
    for changes, message in (
        ({"input_mean": mean[:, 1:]}, r"input_mean must be contiguous .* \(1, 16\)"),
        ({"input_mean": mean.double()}, "input_mean must be"),
        ({"head_dim": 32}, "head_dim must be 64 or 128, got 32"),
        ({"block_lengths": torch.ones(2, dtype=torch.int32)}, "block_lengths must be"),
        ({"bias": torch.zeros(3)}, "bias must have shape"),
    ):
        with pytest.raises(ValueError, match=message):
            operator(**values(**changes))


def test_dense_operands_that_do_not_fit():
    given = {name: x for name, x in arguments().items() if name != "routing_mode"}
    with pytest.raises(ValueError, match="must be one of 'per_thread', 'per_warp', got 'per_row'"):
        dense.project_query(**given, qk_quantization="per_row")
    with pytest.raises(ValueError, match="softmax_scale must be finite"):
        dense.project_query(**given | {"softmax_scale": 0.0})
    with pytest.raises(ValueError, match="dense Piper projection: cos must be contiguous"):
        dense.project_key(**keys_of(given) | {"cos": given["cos"].half()})
    with pytest.raises(ValueError, match="qk_quantization must be one of"):
        dense.project_key(**keys_of(given), qk_quantization="")
    with pytest.raises(ValueError, match="input_mean must be"):
        dense.project_value(**values(input_mean=values()["input_mean"].half()))
    empty = {name: values()[name][:, :0] for name in ("input_qdata", "input_scale")}
    with pytest.raises(ValueError, match="at least 1 sequence rows, got 0"):
        dense.project_value(**values(**empty))
