"""Plain models of attention between projections, and their graphs after passes."""

from dataclasses import dataclass

import torch
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torchao.prototype.mx_formats.nvfp4_tensor import QuantizeTensorToNVFP4Kwargs

from piper_kernels import SparsePiperAttention, piper_attention, sparse_piper_coarse_residual
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor

OPTION = "post_grad_custom_pre_pass"
EPS = 1e-5


def rand(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def quantize(fmt, dense, *, group_size=64, act=None):
    """Return a weight whose input has a static scale ``act``, or a dynamic one."""
    if fmt == "convrot_int8":
        return ConvRotInt8Tensor.from_hp(dense, group_size=group_size, act_per_tensor_scale=act)
    options = {
        "is_swizzled_scales": True,
        "act_quant_kwargs": QuantizeTensorToNVFP4Kwargs(
            is_swizzled_scales=True, use_dynamic_per_tensor_scale=act is None
        ),
        "act_per_tensor_scale": act,
        "per_tensor_scale": dense.abs().amax().float() / (448 * 6),
    }
    if fmt == "convrot_nvfp4":
        return ConvRotNVFP4Tensor.from_hp(dense, group_size=group_size, **options)
    return PiperNVFP4Tensor.from_hp(dense, **options)


def rms_norm(x, weight):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (wide if weight is None else wide * weight).to(x.dtype)


def rope(x, cos, sin, sequence_dim=1):
    cos, sin = cos.to(x.dtype)[None], sin.to(x.dtype)[None]
    axis = 2 if sequence_dim == 1 else 1
    cos, sin = cos.unsqueeze(axis), sin.unsqueeze(axis)
    width = cos.shape[-1]
    turned = x if width == x.shape[-1] else x[..., :width]
    low, high = turned.chunk(2, -1)
    turned = turned * cos + torch.cat((-high, low), -1) * sin
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), -1)


@dataclass
class Model:
    """RMSNorm and RoPE of projected heads, attention, coarse residual and output projection."""

    fmt: str = "convrot_int8"
    batch: int = 1
    rows: int = 192
    features: int = 64
    heads: int = 2
    head_dim: int = 64
    rotary: int = 48
    outputs: int | None = None
    dtype: torch.dtype = torch.bfloat16
    routing: str = "minmax"
    query_norm: bool = True
    key_norm: bool = True
    biases: tuple = (None, None, None, None, None)  # dtypes of q, k, v, output and gate
    scales: tuple = (None, None, None, None, None)
    coarse: bool = False
    projected_gate: bool = False
    lengths: tuple | None = None
    key_blocks: int = 2
    query_blocks: int | None = None
    coarse_key_blocks: int | None = None
    ratios: tuple = (0.5, 1.0)
    dense: bool = False
    is_causal: bool = False
    kv_heads: int | None = None

    def __post_init__(self):
        self.attention = None if self.dense else SparsePiperAttention(
            self.ratios, routing=self.routing
        )  # fmt: skip
        width = self.heads * self.head_dim
        narrow = (self.kv_heads or self.heads) * self.head_dim
        shapes = {"q": (width, self.features), "k": (narrow, self.features)}
        shapes["v"] = (narrow, self.features)
        shapes["out"] = (self.outputs or 16, width)
        shapes["gate"] = (width, self.features)
        self.weights, self.bias = {}, {}
        for index, (name, shape) in enumerate(shapes.items()):
            dense = (rand(*shape, seed=index + 1) / shape[1] ** 0.5).to(self.dtype)
            self.weights[name] = quantize(self.fmt, dense, act=self.scales[index])
            kind = self.biases[index]
            self.bias[name] = None if kind is None else rand(shape[0], seed=index + 9, dtype=kind)
        self.norms = {
            "q": 0.5 + rand(self.head_dim, seed=21).abs().to(self.dtype)
            if self.query_norm else None,
            "k": 0.5 + rand(self.head_dim, seed=22).abs() if self.key_norm else None,
        }  # fmt: skip
        angles = rand(self.rows, self.rotary // 2, seed=23)
        self.cos, self.sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))
        self.x = rand(self.batch, self.rows, self.features, seed=24, dtype=self.dtype)
        self.gate = rand(self.batch, self.rows, self.heads, self.head_dim, seed=25,
                         dtype=self.dtype)  # fmt: skip
        self.block_lengths = None
        if self.lengths is not None:
            self.block_lengths = torch.tensor(self.lengths, dtype=torch.int32)

    def to(self, device):
        """Return the model with everything on a device."""
        self.weights = {name: weight.to(device) for name, weight in self.weights.items()}
        for group in (self.bias, self.norms):
            group.update({k: v if v is None else v.to(device) for k, v in group.items()})
        for name in ("cos", "sin", "x", "gate", "block_lengths"):
            value = getattr(self, name)
            setattr(self, name, value if value is None else value.to(device))
        return self

    def linear(self, name, x):
        return functional.linear(x, self.weights[name], self.bias[name])

    def operands(self, x, cos, sin):
        heads = [
            self.linear(name, x).unflatten(-1, (-1, self.head_dim)) for name in ("q", "k", "v")
        ]
        if self.dense:
            heads = [part.transpose(1, 2) for part in heads]
        axis = 2 if self.dense else 1
        turned = [
            rope(rms_norm(part, self.norms[name]), cos, sin, axis)
            for name, part in zip("qk", heads, strict=False)
        ]
        return *turned, heads[2]

    def attend(self, query, key, value, x, gate, lengths):
        if self.dense:
            return piper_attention(query, key, value, is_causal=self.is_causal).transpose(1, 2)
        fine = self.attention(
            query, key, value, sparse_key_blocks=self.key_blocks, block_lengths=lengths,
            sparse_query_blocks=self.query_blocks,
        )  # fmt: skip
        if not self.coarse:
            return fine
        if self.projected_gate:
            gate = self.linear("gate", x).unflatten(-1, (-1, self.head_dim))
        return fine + sparse_piper_coarse_residual(
            query, key, value, gate, routing=self.routing, coarse_scale=0.125,
            block_lengths=lengths, coarse_key_blocks=self.coarse_key_blocks,
        )  # fmt: skip

    def __call__(self, x, cos, sin, gate, lengths):
        merged = self.attend(*self.operands(x, cos, sin), x, gate, lengths).flatten(2)
        return merged if self.outputs is None else self.linear("out", merged)

    @property
    def args(self):
        return self.x, self.cos, self.sin, self.gate, self.block_lengths

    @property
    def valid_rows(self):
        """Return the indices of the rows that exist."""
        if self.lengths is None:
            return torch.arange(self.rows)
        return torch.cat([torch.arange(n) + 64 * i for i, n in enumerate(self.lengths)])

    def eager(self):
        with torch.no_grad():
            return self(*self.args)


class Module(torch.nn.Module):
    """A model whose weights are parameters, for ``torch.compile``; subclasses have ``forward``."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        for name, weight in model.weights.items():
            self.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))
        model.linear = lambda name, x: functional.linear(x, getattr(self, name))


def trace(model, options, *, symbolic=False, args=None):
    """Return the functional graph of a model after the passes of options.

    Weights and other tensors of the model become inputs, which is what Dynamo makes of them.
    """
    args = model.args if args is None else args
    groups = (model.weights, model.bias, model.norms)
    flat, specs = torch.utils._pytree.tree_flatten([_unwrap(group) for group in groups])

    def function(given, tensors):
        unflattened = torch.utils._pytree.tree_unflatten(tensors, specs)
        saved = [dict(group) for group in groups]
        for group, values in zip(groups, unflattened, strict=True):
            group.update(_wrap(group, values))
        try:
            return model(*given)
        finally:
            for group, values in zip(groups, saved, strict=True):
                group.update(values)

    with torch.no_grad():
        module = make_fx(
            function,
            decomposition_table=select_decomp_table(),
            tracing_mode="symbolic" if symbolic else "fake",
        )(args, flat)
    module.graph.eliminate_dead_code()
    passes = options[OPTION]
    for graph_pass in passes if isinstance(passes, (list, tuple)) else [passes]:
        graph_pass(module.graph, is_inference=True)
    module.recompile()
    return Traced(module, args, flat)


class Traced:
    """A graph and its inputs."""

    def __init__(self, module, args, flat):
        self.module, self.args, self.flat = module, args, flat

    def __call__(self):
        with torch.no_grad():
            return self.module(self.args, self.flat)

    @property
    def nodes(self):
        return list(self.module.graph.nodes)

    @property
    def targets(self):
        """Names of the operators of this library, in order."""
        names = [node.target._schema.name for node in self.nodes
                 if getattr(node.target, "namespace", "") == "piper_kernels"]  # fmt: skip
        return [name.removeprefix("piper_kernels::") for name in names]

    def change_chunk_rows(self, rows):
        """Give the call that projects from windows another number of rows; return the old one."""
        (call,) = [node for node in self.nodes if "attention_output" in str(node.target)]
        name = "query_chunk_rows"
        if name in call.kwargs:
            before = call.kwargs[name]
            call.kwargs = {**call.kwargs, name: rows}
        else:
            schema = call.target._schema.arguments
            position = [argument.name for argument in schema].index(name)
            before = call.args[position]
            call.args = (*call.args[:position], rows, *call.args[position + 1 :])
        self.module.recompile()
        return before

    def find(self, name):
        """Return the only call of an operator."""
        (node,) = [n for n in self.nodes if str(n.target) == f"piper_kernels.{name}.default"]
        return node


def _unwrap(group):
    return {k: v.__tensor_flatten__() and _inner(v) if hasattr(v, "__tensor_flatten__") else v
            for k, v in group.items()}  # fmt: skip


def _inner(weight):
    names, _ = weight.__tensor_flatten__()
    return {name: getattr(weight, name) for name in names}


def _wrap(group, values):
    wrapped = {}
    for name, value in values.items():
        like, wrapped[name] = group[name], value
        if isinstance(value, dict):
            _, context = like.__tensor_flatten__()
            shape = (like.shape, like.stride())
            wrapped[name] = type(like).__tensor_unflatten__(value, context, *shape)
    return wrapped


def relative_error(actual, expected, rows=None):
    """Return the relative L2 distance, over some rows of the sequence."""
    if rows is not None:
        actual, expected = actual[:, rows], expected[:, rows]
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()
