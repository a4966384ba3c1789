"""Which graphs become networks, and which are left alone."""

import pytest
import torch
from format_weights import quantized
from torch.nn import functional

from piper_kernels.fusions._ffn.chunks import int8_chunk_rows
from piper_kernels.fusions.convrot_int8_gelu_ffn import convrot_int8_gelu_ffn_compile_options
from piper_kernels.fusions.convrot_int8_swiglu_ffn import convrot_int8_swiglu_ffn_compile_options
from piper_kernels.fusions.convrot_nvfp4_gelu_ffn import convrot_nvfp4_gelu_ffn_compile_options
from piper_kernels.fusions.convrot_nvfp4_swiglu_ffn import convrot_nvfp4_swiglu_ffn_compile_options
from piper_kernels.fusions.nvfp4_gelu_ffn import nvfp4_gelu_ffn_compile_options
from piper_kernels.fusions.nvfp4_swiglu_ffn import nvfp4_swiglu_ffn_compile_options

BF16 = torch.bfloat16
SWIGLU = {
    "convrot_int8": convrot_int8_swiglu_ffn_compile_options,
    "nvfp4": nvfp4_swiglu_ffn_compile_options,
    "convrot_nvfp4": convrot_nvfp4_swiglu_ffn_compile_options,
}
GELU = {
    "convrot_int8": convrot_int8_gelu_ffn_compile_options,
    "nvfp4": nvfp4_gelu_ffn_compile_options,
    "convrot_nvfp4": convrot_nvfp4_gelu_ffn_compile_options,
}
# Two linears after each other; inputs of four bits have errors of about 9 % each, and codes
# move by one step when the activation is no longer rounded in between.
TOLERANCE = {"convrot_int8": 0.02, "nvfp4": 0.05, "convrot_nvfp4": 0.05}


def rand(*shape, dtype=BF16, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def make(fmt, rows, features, seed=0, act=None, dtype=BF16, group_size=16):
    dense = (rand(rows, features, dtype=torch.float32, seed=seed) / features**0.5).to(dtype)
    return quantized(fmt, dense, group_size=group_size, act=act)


def weights(fmt, **options):
    return [make(fmt, 64, 32, 1, **options), make(fmt, 64, 32, 2, **options),
            make(fmt, 32, 64, 3, **options)]  # fmt: skip


def swiglu_of(gate, value, down):
    return functional.linear(functional.silu(gate) * value, down)


def swiglu(x, gate, value, down):
    return swiglu_of(functional.linear(x, gate), functional.linear(x, value), down)


def swapped(x, gate, value, down):
    return functional.linear(
        functional.linear(x, value) * functional.silu(functional.linear(x, gate)), down
    )


def promoted(x, gate, value, down):
    hidden = functional.silu(functional.linear(x, gate).float()) * functional.linear(x, value)
    return functional.linear(hidden.to(x.dtype), down)


def promoted_activation(x, gate, value, down):
    hidden = functional.silu(functional.linear(x, gate).float()).to(x.dtype)
    return functional.linear(hidden * functional.linear(x, value), down)


def both_promoted(x, gate, value, down):
    hidden = functional.silu(functional.linear(x, gate).float())
    return functional.linear((hidden * functional.linear(x, value).float()).to(x.dtype), down)


def by_sigmoid(x, gate, value, down):
    gated = functional.linear(x, gate)
    return functional.linear(gated * torch.sigmoid(gated) * functional.linear(x, value), down)


def gelu(x, up, down, bias=None):
    hidden = functional.gelu(functional.linear(x, up), approximate="tanh")
    return functional.linear(hidden, down, bias)


def check(graph_capture, function, *args, fmt="convrot_int8", **given):
    return graph_capture.check(function, *args, tolerance=TOLERANCE[fmt], **given)


@pytest.mark.parametrize("fmt", SWIGLU)
@pytest.mark.parametrize("dynamic", [False, True])
def test_networks_become_one_operator(graph_capture, fmt, dynamic):
    x, (gate, value, down) = rand(2, 9, 32), weights(fmt)
    check(graph_capture, swiglu, x, gate, value, down, options=SWIGLU[fmt](),
          targets=[f"{fmt}_swiglu_ffn"], fmt=fmt, dynamic=dynamic)  # fmt: skip
    check(graph_capture, gelu, x, value, down, rand(32, dtype=torch.float32),
          options=GELU[fmt](), targets=[f"{fmt}_gelu_ffn"], fmt=fmt, dynamic=dynamic)  # fmt: skip


@pytest.mark.parametrize(
    "function", [swapped, promoted, promoted_activation, both_promoted, by_sigmoid]
)
def test_ways_to_write_swiglu(graph_capture, function):
    x, network = rand(9, 32), weights("convrot_int8")
    options = convrot_int8_swiglu_ffn_compile_options()
    check(graph_capture, function, x, *network, options=options,
          targets=["convrot_int8_swiglu_ffn"])  # fmt: skip


def test_gate_and_value_keep_their_places(graph_capture):
    capture = check(graph_capture, swapped, rand(9, 32), *weights("convrot_int8"),
                    options=convrot_int8_swiglu_ffn_compile_options(),
                    targets=["convrot_int8_swiglu_ffn"])  # fmt: skip
    node = next(n for n in capture.graph_modules[-1].graph.nodes if "swiglu_ffn" in str(n.target))
    assert node.args[13] == int8_chunk_rows(2, 32, 64, 32, 2)
    assert node.args[4] == node.args[8] == node.args[12] == 16


@pytest.mark.parametrize("fmt", SWIGLU)
def test_static_and_mixed_scales(graph_capture, fmt):
    scale = torch.tensor(0.03 if fmt == "convrot_int8" else 0.002)
    network = [
        make(fmt, 64, 32, 1, act=scale), make(fmt, 64, 32, 2), make(fmt, 32, 64, 3, act=scale)
    ]  # fmt: skip
    check(graph_capture, swiglu, rand(9, 32), *network, options=SWIGLU[fmt](),
          targets=[f"{fmt}_swiglu_ffn"], fmt=fmt)  # fmt: skip


def test_plain_and_rotated_nvfp4_mix(graph_capture):
    network = [
        make("nvfp4", 64, 32, 1), make("nvfp4", 64, 32, 2), make("convrot_nvfp4", 32, 64, 3)
    ]  # fmt: skip
    check(graph_capture, swiglu, rand(9, 32), *network, fmt="nvfp4",
          options=convrot_nvfp4_swiglu_ffn_compile_options(),
          targets=["convrot_nvfp4_swiglu_ffn"])  # fmt: skip
    plain = weights("nvfp4")
    _, capture = graph_capture.run(
        swiglu, rand(9, 32), *plain, options=convrot_nvfp4_swiglu_ffn_compile_options()
    )
    assert "convrot_nvfp4_swiglu_ffn" not in capture.targets


LINEAR, PREPARE, PREPARED = (
    "convrot_int8_linear", "convrot_int8_prepare_input", "convrot_int8_linear_prepared"
)  # fmt: skip


def other_input(x, gate, value, down):
    return swiglu_of(functional.linear(x, gate), functional.linear(-x, value), down)


def escaping_gate(x, gate, value, down):
    gated = functional.linear(x, gate)
    return swiglu_of(gated, functional.linear(x, value), down), gated


def escaping_product(x, gate, value, down):
    hidden = functional.silu(functional.linear(x, gate)) * functional.linear(x, value)
    return functional.linear(hidden, down), hidden


def one_projection(x, gate, value, down):
    hidden = functional.linear(x, gate)
    return swiglu_of(hidden, hidden, down)


def other_activation(x, gate, value, down):
    return functional.linear(
        functional.gelu(functional.linear(x, gate)) * functional.linear(x, value), down
    )


@pytest.mark.parametrize(
    ("function", "targets"),
    [
        (other_input, [LINEAR] * 3),
        (escaping_gate, [PREPARE, PREPARED, PREPARED, LINEAR]),
        (escaping_product, [PREPARE, PREPARED, PREPARED, LINEAR]),
        (one_projection, [LINEAR] * 2),
        (other_activation, [PREPARE, PREPARED, PREPARED, LINEAR]),
    ],
)
def test_other_graphs_are_left_to_the_linear_pass(graph_capture, function, targets):
    options = convrot_int8_swiglu_ffn_compile_options()
    check(graph_capture, function, rand(9, 32), *weights("convrot_int8"),
          options=options, targets=targets)  # fmt: skip


@pytest.mark.parametrize("case", ["float32", "transposed", "empty", "group sizes"])
def test_inputs_and_weights_that_networks_do_not_take(graph_capture, case):
    x, network = rand(9, 32), weights("convrot_int8")
    targets = [PREPARE, PREPARED, PREPARED, LINEAR]
    if case == "float32":
        x, network = x.float(), weights("convrot_int8", dtype=torch.float32)
    elif case == "transposed":
        x = rand(32, 9).t()
    elif case == "empty":
        x = rand(0, 32)
    else:
        x = rand(9, 64)
        network = [make("convrot_int8", 64, 64, 1), make("convrot_int8", 64, 64, 2, group_size=64),
                   network[2]]  # fmt: skip
        targets = [LINEAR] * 3
    _, capture = graph_capture.run(
        swiglu, x, *network, options=convrot_int8_swiglu_ffn_compile_options()
    )
    assert capture.targets == targets


def test_training_graphs_keep_their_linears(graph_capture):
    _, capture = graph_capture.run(
        swiglu,
        rand(9, 32),
        *weights("convrot_int8"),
        options=convrot_int8_swiglu_ffn_compile_options(),
        is_inference=False,
    )
    assert capture.targets == [LINEAR] * 3


def test_row_views_between_linears_do_not_matter(graph_capture):
    def flat_linear(x, weight):
        rows = functional.linear(x.reshape(-1, x.shape[-1]), weight)
        return rows.view(*x.shape[:-1], weight.shape[0])

    def block(x, gate, value, down):
        hidden = functional.silu(flat_linear(x, gate)) * flat_linear(x, value)
        return flat_linear(hidden, down)

    check(graph_capture, block, rand(2, 9, 32), *weights("convrot_int8"), dynamic=True,
          options=convrot_int8_swiglu_ffn_compile_options(),
          targets=["convrot_int8_swiglu_ffn"])  # fmt: skip


def gated_block(lookup):
    def block(x, attention, first, second, index, up, down):
        update = torch.tanh(attention)
        return x + lookup(first, index) * update + lookup(second, index) * gelu(x, up, down)

    return block


def gated_args(fmt, index=None):
    tables = (rand(3, 32, seed=1), rand(3, 32, seed=2))
    index = torch.arange(18) % 3 if index is None else index
    return (rand(18, 32), rand(18, 32, seed=3), *tables, index, *weights(fmt)[1:])


@pytest.mark.parametrize("fmt", GELU)
def test_gated_updates_become_part_of_the_operator(graph_capture, fmt):
    index = torch.arange(18) % 3 - 3
    check(graph_capture, gated_block(lambda t, i: t[i]), *gated_args(fmt, index), fmt=fmt,
          options=GELU[fmt](), targets=[f"{fmt}_gelu_ffn_gated_updates_"])  # fmt: skip
    for lookup in (lambda t, i: functional.embedding(i, t), lambda t, i: t.index_select(0, i)):
        check(graph_capture, gated_block(lookup), *gated_args(fmt), fmt=fmt,
              options=GELU[fmt](), targets=[f"{fmt}_gelu_ffn_gated_updates_"])  # fmt: skip


def test_updates_that_are_not_fresh_and_exclusive_stay_outside(graph_capture):
    def callers(x, update, first, second, index, up, down):
        return x + first[index] * update + second[index] * gelu(x, up, down)

    def escaping(x, attention, first, second, index, up, down):
        update = torch.tanh(attention)
        result = x + first[index] * update + second[index] * gelu(x, up, down)
        return result, update

    def two_indices(x, attention, first, second, index, up, down):
        update = first[index + 0] * torch.tanh(attention)
        return x + update + second[index] * gelu(x, up, down)

    for block in (callers, escaping, two_indices):
        check(graph_capture, block, *gated_args("convrot_int8"),
              options=convrot_int8_gelu_ffn_compile_options(),
              targets=["convrot_int8_gelu_ffn"])  # fmt: skip
