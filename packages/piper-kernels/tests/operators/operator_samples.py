"""Operands for every operator that the package registers, on any device."""

import importlib
import pkgutil
from dataclasses import dataclass
from functools import cache

import torch

import piper_kernels
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor

NAMESPACE = "piper_kernels"
ATTENTION = ("attention", "piper", "sage")
GROUP, ROWS, FEATURES, INNER, OUTPUTS = 16, 9, 64, 96, 48
CHUNK_ROWS = 128


def operator_names():
    """Return the names of all operators of weights, linears and their fusions.

    Every module is imported first. Operators of attention have tests of their own.
    """
    for info in pkgutil.walk_packages(piper_kernels.__path__, "piper_kernels."):
        if ".attention" not in info.name and not info.name.endswith(
            ("__main__", "triton", "kernels", "kernel", "hopper")
        ):
            importlib.import_module(info.name)
    prefix = f"{NAMESPACE}::"
    names = torch._C._dispatch_get_all_op_names()
    found = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
    return sorted(name for name in found if not any(word in name for word in ATTENTION))


@dataclass(frozen=True)
class Sample:
    """Arguments of an operator.

    Attributes:
        operator: Name in the namespace.
        label: What tells samples of one operator apart.
        arguments: Positional arguments.
    """

    operator: str
    label: str
    arguments: tuple

    def __str__(self):
        return f"{self.operator}-{self.label}"

    @property
    def overload(self):
        """The overload to call."""
        return getattr(torch.ops.piper_kernels, self.operator).default


class Maker:
    """Makes random operands on a device; two makers with one seed make the same."""

    def __init__(self, device):
        self.device = torch.device(device)
        self.generator = torch.Generator().manual_seed(5)

    def random(self, *shape, dtype=torch.bfloat16):
        return torch.randn(shape, generator=self.generator).to(self.device, dtype)

    def number(self, value):
        return torch.tensor(value, device=self.device)

    def int8(self, rows, columns):
        return ConvRotInt8Tensor.from_hp(self.random(rows, columns), group_size=GROUP)

    def nvfp4(self, rows, columns, group):
        options = {"compute_per_tensor_scale": True, "is_swizzled_scales": True}
        if group:
            options["group_size"] = group
        return (ConvRotNVFP4Tensor if group else PiperNVFP4Tensor).from_hp(
            self.random(rows, columns), **options
        )


@cache
def samples(device):
    """Return the samples of every operator that is described here; do not write into them."""
    operator_names()  # registers them
    maker = Maker(device)
    found = [*_int8(maker), *_int8_weights(maker), *_nvfp4(maker), *_nvfp4_weights(maker)]
    found += [*_networks(maker), *_convolutions(maker)]
    return found


def _int8(m):
    weight, bias = m.int8(OUTPUTS, FEATURES), m.random(OUTPUTS, dtype=torch.float32)
    storage, static = (weight.qdata, weight.scale), m.number(0.02)
    for label, x, scale in (
        ("rows", m.random(2, ROWS, FEATURES), None),
        ("static", m.random(ROWS, FEATURES), static),
        ("strided", m.random(FEATURES, ROWS).t(), None),
        ("one row", m.random(FEATURES), None),
        ("empty", m.random(0, FEATURES), None),
    ):
        yield Sample("convrot_int8_linear", label, (x, *storage, bias, GROUP, None, scale))
        yield Sample("convrot_int8_prepare_input", label, (x, GROUP, None, scale))
        codes, rows = torch.ops.piper_kernels.convrot_int8_prepare_input(x, GROUP, None, scale)
        arguments = (codes, rows, *storage, None, torch.float16)
        yield Sample("convrot_int8_linear_prepared", label, arguments)
    for label, operands in (("rows", (codes, rows)), ("empty", (codes[:0], rows[:0]))):
        arguments = (*operands, *storage, bias, torch.float16, [32, 64, 64, 4, 2])
        yield Sample("minimax_h3_vae_convrot_int8_linear_prepared", label, arguments)
    for activation, width in (("gelu_tanh", FEATURES), ("swiglu", 2 * FEATURES)):
        x = m.random(ROWS, width)
        yield Sample("convrot_int8_linear", activation, (x, *storage, bias, GROUP, activation))
        yield Sample("convrot_int8_prepare_input", activation, (x, GROUP, activation))
    x = m.random(2, 128, FEATURES)
    codes, rows = torch.ops.piper_kernels.convrot_int8_prepare_input(x, GROUP)
    lengths = torch.tensor([64, 17], dtype=torch.int32, device=m.device)
    name = "convrot_int8_dequantized_input_mean"
    yield Sample(name, "all", (codes, rows))
    yield Sample(name, "block lengths", (codes, rows, lengths))


def _convolutions(m):
    dense = m.random(5, 64, 3, 3, 3, dtype=torch.float16)
    weight = ConvRotInt8Tensor.from_hp(dense, group_size=GROUP)
    bias, scale = m.random(5, dtype=torch.float16), m.number(0.03)
    storage = (weight.qdata, weight.scale, bias, GROUP, scale)
    norm = (m.random(64, dtype=torch.float32), m.random(64, dtype=torch.float16), 8, 1e-6)
    x = m.random(1, 64, 3, 5, 6, dtype=torch.float16)
    residual = m.random(1, 5, 2, 3, 3, dtype=torch.float16)
    for label, source, rest in (
        ("reflect", x, ([2, 2, 2], True, False, residual)),
        ("reflect right", x.transpose(3, 4), ([1, 2, 2], False, True, None)),
        ("none", x.float(), ([1, 1, 1], False, False, None)),
    ):
        yield Sample("convrot_int8_conv3d", label, (source, *storage, *rest))
        arguments = (source, *norm, *storage, *rest)
        yield Sample("convrot_int8_group_norm_silu_conv3d", label, arguments)


def _int8_weights(m):
    weight = m.int8(OUTPUTS, FEATURES)
    storage, update = (weight.qdata, weight.scale), m.random(OUTPUTS, FEATURES)
    factors = (m.random(OUTPUTS, 4), m.random(4, FEATURES))
    yield Sample("convrot_int8_add_", "nearest", (*storage, update, GROUP, 0.5))
    yield Sample("convrot_int8_addmm_", "nearest", (*storage, *factors, GROUP, 1.0, 0.5))
    yield Sample("convrot_int8_add_", "seed", (*storage, update, GROUP, 0.5, -1))
    yield Sample("convrot_int8_quantize_weight", "bf16", (update, GROUP))


def _nvfp4(m):
    ops = torch.ops.piper_kernels
    for prefix, group in (("", 0), ("convrot_", GROUP)):
        weight, bias = m.nvfp4(OUTPUTS, FEATURES, group), m.random(OUTPUTS)
        storage = (weight.qdata, weight.scale, weight.per_tensor_scale.view(()))
        groups = (group,) if group else ()
        for label, x, level, dynamic in (
            ("dynamic", m.random(2, ROWS, FEATURES), None, True),
            ("static", m.random(ROWS, FEATURES), m.number(0.001), False),
            ("strided", m.random(FEATURES, ROWS).t(), None, True),
            ("empty", m.random(0, FEATURES), None, True),
        ):
            arguments = (x, *storage, level, bias, dynamic, *groups)
            yield Sample(f"{prefix}nvfp4_linear", label, arguments)
            prepare = f"{prefix}nvfp4_prepare_input"
            yield Sample(prefix + "nvfp4_prepare_input", label, (x, level, dynamic, *groups))
            prepared = getattr(ops, prepare)(x, level, dynamic, *groups)
            arguments = (*prepared, *storage, m.random(OUTPUTS, dtype=torch.float32))
            name = f"{label} {group}"
            yield Sample("nvfp4_linear_prepared", name, (*arguments, torch.bfloat16))
            arguments = (x, *storage, bias, group, True)
            yield Sample("nvfp4_weight_only_linear", name, arguments)


def _nvfp4_weights(m):
    factors = (m.random(OUTPUTS, 4), m.random(4, FEATURES))
    for group in (0, GROUP):
        weight, update = m.nvfp4(OUTPUTS, FEATURES, group), m.random(OUTPUTS, FEATURES)
        storage = (weight.qdata, weight.scale, weight.per_tensor_scale)
        layout = (True, False)
        yield Sample("nvfp4_add_", f"g{group}", (*storage, update, group, 0.5, *layout))
        yield Sample("nvfp4_addmm_", f"g{group}", (*storage, *factors, group, 1.0, 0.5, *layout))
        yield Sample("nvfp4_quantize", f"g{group}", (update, None, group, True))
        yield Sample("nvfp4_quantize_two_level", f"g{group}", (update, group, True))


def _networks(m):
    """Feed-forward networks: arguments follow from the names in the schema."""
    names = [name for name in operator_names() if "_ffn" in name]
    for name in names:
        values = _network_values(m, name)
        schema = getattr(torch.ops.piper_kernels, name).default._schema
        for label, scale in (("dynamic", None), ("static", m.number(0.05))):
            known = values | _scales(schema, scale, nvfp4="nvfp4" in name)
            arguments = tuple(known[argument.name] for argument in schema.arguments)
            yield Sample(name, label, arguments)


def _network_values(m, name):
    nvfp4, rotated = "nvfp4" in name, "convrot" in name
    values = {"input": m.random(ROWS, FEATURES), "chunk_rows": CHUNK_ROWS}
    sources = ("gate", "value") if "swiglu" in name else ("up",)
    for part in (*sources, "down"):
        rows, columns = (OUTPUTS, INNER) if part == "down" else (INNER, FEATURES)
        group = GROUP if rotated else 0
        weight = m.nvfp4(rows, columns, group) if nvfp4 else m.int8(rows, columns)
        values |= {
            f"{part}_weight_qdata": weight.qdata,
            f"{part}_weight_scale": weight.scale,
            f"{part}_bias": m.random(rows),
            f"{part}_group_size": group,
            f"{part}_high_first": False,
        }
        if nvfp4:
            values[f"{part}_weight_per_tensor_scale"] = weight.per_tensor_scale.view(())
    gates = [m.random(3, OUTPUTS) for _ in range(2)]
    indices = torch.arange(ROWS, device=m.device) % 3
    return values | {
        "base": m.random(ROWS, OUTPUTS),
        "reusable_update": m.random(ROWS, OUTPUTS),
        "update_gate": gates[0],
        "ffn_gate": gates[1],
        "gate_indices": indices,
        "python_indexing": False,
    }


def _scales(schema, scale, *, nvfp4):
    found = {}
    for argument in schema.arguments:
        if argument.name.endswith(("_input_scale", "activation_per_tensor_scale")):
            found[argument.name] = scale
        elif "dynamic" in argument.name:
            found[argument.name] = scale is None
    return found
