"""Operands of the operators that project from windows of an attention."""

import torch

from piper_kernels.fusions.convrot_int8_sparse_piper import _compile  # noqa: F401  # registers

ops = torch.ops.piper_kernels


def rand(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def weight(outputs, features, seed):
    """Return int8 codes and scales of 0.001 to 0.011."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, (outputs, features), generator=generator, dtype=torch.int8)
    scale = 0.001 + 0.01 * torch.rand(outputs, 1, generator=generator)
    return codes, scale


def projected(device="cpu", *, batch=1, rows=193, features=64, heads=2, head_dim=64, outputs=40,
              routing=0, lengths=None, dtype=torch.bfloat16):  # fmt: skip
    """Return everything about a sparse attention by its names in the operators."""
    width = heads * head_dim
    x = rand(batch, rows, features, dtype=dtype).to(device)
    tensors = {"q": weight(width, features, 1), "k": weight(width, features, 2),
               "v": weight(width, features, 3), "out": weight(outputs, width, 4),
               "gate": weight(width, features, 5)}  # fmt: skip
    tensors = {name: tuple(t.to(device) for t in pair) for name, pair in tensors.items()}
    angles = rand(rows, head_dim // 4, seed=6)
    cos, sin = (torch.cat((t, t), -1).to(device) for t in (angles.cos(), angles.sin()))
    norm = (0.5 + rand(head_dim, seed=7).abs()).to(device)
    block_lengths = None
    if lengths is not None:
        block_lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
    prepared = ops.convrot_int8_prepare_input(x, 64, None, None)
    tables = {"norm_weight": norm, "cos": cos, "sin": sin, "eps": 1e-5}
    query = {
        "query_input_qdata": prepared[0],
        "query_input_scale": prepared[1],
        "query_weight_qdata": tensors["q"][0],
        "query_weight_scale": tensors["q"][1],
        **tables,
        "softmax_scale": head_dim**-0.5,
    }
    name = "convrot_int8_sparse_piper_project_"
    queries = getattr(ops, f"{name}query")(
        *prepared, *tensors["q"], *tables.values(), query["softmax_scale"], routing, block_lengths
    )
    keys = getattr(ops, f"{name}key")(
        *prepared, *tensors["k"], *tables.values(), routing, block_lengths
    )
    mean = ops.convrot_int8_dequantized_input_mean(*prepared, block_lengths)
    values = getattr(ops, f"{name}value_with_block_means")(
        *prepared, mean, *tensors["v"], block_lengths, head_dim=head_dim
    )
    known = {
        "key": keys[0], "key_scale": keys[1], "key_summary": keys[2], "key_aux": keys[3],
        "value": values[0], "value_scale_multiplier": values[1], "value_mean": values[2],
        "head_keep_ratio_units": [500_000, 1_000_000][:heads] * (heads // 2 or 1),
        "sparse_key_blocks": 2, "logical_sequence_length": rows, "routing_mode": routing,
        "block_lengths": block_lengths, "output_dtype": dtype,
    }  # fmt: skip
    output = {
        "weight_qdata": tensors["out"][0],
        "weight_scale": tensors["out"][1],
        "bias": rand(outputs, seed=8).to(device),
        "group_size": 64,
    }
    gates = {
        "gate_input_qdata": prepared[0],
        "gate_input_scale": prepared[1],
        "gate_weight_qdata": tensors["gate"][0],
        "gate_weight_scale": tensors["gate"][1],
    }
    return {
        "x": x,
        "prepared": prepared,
        "query": query,
        "queries": dict(zip(("query", "query_scale", "query_summary"), queries, strict=True)),
        "keys": known,
        "block_mean": values[3],
        "output": output,
        "gates": gates,
        "coarse": {"coarse_scale": 0.125, "coarse_key_blocks": 3},
    }


def bind(operator, arguments):
    """Return arguments by position and by keyword from all by name; others are defaults."""
    given = dict(arguments)
    args, kwargs = [], {}
    for argument in operator.default._schema.arguments:
        value = given.pop(argument.name, argument.default_value)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    assert not given, f"unknown arguments {list(given)}"
    return args, kwargs


def call(operator, arguments):
    """Call an operator whose arguments are given by name."""
    args, kwargs = bind(operator, arguments)
    return operator(*args, **kwargs)


def chain(parts, *, coarse):
    """Return the same result from the operators that have everything in memory."""
    arguments = parts["keys"] | parts["queries"]
    if coarse:
        rows = ops.convrot_int8_linear_prepared(
            parts["gates"]["gate_input_qdata"], parts["gates"]["gate_input_scale"],
            parts["gates"]["gate_weight_qdata"], parts["gates"]["gate_weight_scale"], None,
            parts["x"].dtype,
        )  # fmt: skip
        head_dim = arguments["query"].shape[3]
        gate = rows.unflatten(-1, (-1, head_dim))
        arguments |= {"block_mean": parts["block_mean"], "coarse_gate": gate, **parts["coarse"]}
        operator = ops.sparse_piper_attention_with_coarse_residual_from_quantized
    else:
        operator = ops.sparse_piper_attention_from_quantized
    attention = call(operator, arguments).flatten(2)
    output = parts["output"]
    return ops.convrot_int8_linear(
        attention, output["weight_qdata"], output["weight_scale"], output["bias"],
        output["group_size"],
    )  # fmt: skip
