"""Runs the arithmetic of Gluon functions on PyTorch tensors: layouts are ignored.

Modules are executed again with functions that are not compiled and a language that computes at
once, so indices, masks and formulas are those of the kernels. Pointers are a flat tensor with
offsets; a load or store out of its range fails.
"""

import builtins
import importlib.util
import operator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

_UNSIGNED = {torch.uint32: 0xFFFFFFFF, torch.uint64: -1}
_ANY = SimpleNamespace(layout=None)


def _raw(value):
    return value.data if isinstance(value, Block) else value


def _binary(function):
    return lambda self, other: Block(function(self.data, _raw(other)))


def _reverse(function):
    return lambda self, other: Block(function(_raw(other), self.data))


@dataclass(frozen=True, eq=False)
class Block:
    """A tensor of a program."""

    data: torch.Tensor

    @property
    def shape(self):
        return list(self.data.shape)

    @property
    def type(self):
        return _ANY

    def to(self, dtype, bitcast=False):
        if bitcast:
            return Block(self.data.contiguous().view(dtype))
        if dtype in _UNSIGNED:
            return Block(self.data.long() & _UNSIGNED[dtype])
        if dtype in (torch.int8, torch.int16):  # the low bits
            bits = 8 * dtype.itemsize
            low = self.data.long() & (2**bits - 1)
            return Block((low - (low >> (bits - 1) << bits)).to(dtype))
        return Block(self.data.to(dtype))

    __add__, __radd__ = _binary(operator.add), _reverse(operator.add)
    __sub__, __rsub__ = _binary(operator.sub), _reverse(operator.sub)
    __mul__, __rmul__ = _binary(operator.mul), _reverse(operator.mul)
    __truediv__, __rtruediv__ = _binary(operator.truediv), _reverse(operator.truediv)
    __floordiv__, __mod__ = _binary(operator.floordiv), _binary(operator.mod)
    __and__, __or__ = _binary(operator.and_), _binary(operator.or_)
    __xor__ = _binary(operator.xor)
    __lshift__, __rshift__ = _binary(operator.lshift), _binary(operator.rshift)
    __lt__, __ge__ = _binary(operator.lt), _binary(operator.ge)

    __hash__ = None

    def __eq__(self, other):
        return Block(self.data == _raw(other))

    def __bool__(self):
        return bool(self.data)


@dataclass(frozen=True)
class Pointer:
    """Places of a flat tensor."""

    memory: torch.Tensor
    offset: torch.Tensor

    @classmethod
    def of(cls, tensor):
        assert tensor.is_contiguous()
        return cls(tensor.view(-1), torch.zeros((), dtype=torch.int64))

    @property
    def dtype(self):
        return SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, offset):
        return Pointer(self.memory, self.offset + _raw(offset))


@dataclass(frozen=True)
class Ring:
    """Slots of shared memory that hold matrices, or nothing."""

    slots: tuple = ()
    shape: tuple = (3,)

    def index(self, slot):
        return self.slots[slot] if self.slots else None


@dataclass(frozen=True)
class Tile:
    """A matrix in shared memory."""

    data: torch.Tensor

    def _reinterpret(self, dtype, shape, layout):
        assert self.data.dtype == dtype
        assert list(self.data.shape) == shape
        return self

    def slice(self, start, length, dim):
        return Tile(self.data.narrow(dim, start, length))

    def load(self, layout):
        return Block(self.data)


def load(pointer, mask=None, other=0.0):
    offset = pointer.offset
    kept = torch.ones_like(offset, dtype=torch.bool) if mask is None else _raw(mask)
    kept, offset = torch.broadcast_tensors(kept, offset)
    assert offset[kept].numel() == 0 or offset[kept].min() >= 0
    values = torch.full(offset.shape, other, dtype=pointer.memory.dtype)
    values[kept] = pointer.memory[offset[kept]]
    return Block(values)


def store(pointer, value, mask=None):
    value = torch.as_tensor(_raw(value))
    shape = torch.broadcast_shapes(pointer.offset.shape, value.shape)
    offset, value = pointer.offset.expand(shape), value.expand(shape)
    kept = torch.ones(shape, dtype=torch.bool) if mask is None else _raw(mask).expand(shape)
    assert offset[kept].numel() == 0 or offset[kept].min() >= 0
    assert value.dtype == pointer.memory.dtype, (value.dtype, pointer.memory.dtype)
    pointer.memory[offset[kept]] = value[kept]


def where(condition, x, y):
    """Choose; two integers of a program are unsigned or 32 bits wide."""
    return Block(torch.where(_raw(condition), *(torch.as_tensor(_raw(v)) for v in (x, y))))


def _copied(code, constraints, operands, **_):
    assert code == "mov.b32 $0, $1;"
    return operands[0]


def _language():
    dtypes = ("int8", "int16", "int32", "int64", "uint32", "float32", "bfloat16", "float16")
    return SimpleNamespace(
        **{name: getattr(torch, name) for name in dtypes},
        constexpr=lambda value: value,
        static_range=range,
        SliceLayout=lambda *_: None,
        BlockedLayout=lambda *_: None,
        arange=lambda start, stop, layout: Block(torch.arange(start, stop, dtype=torch.int32)),
        cdiv=lambda x, y: (x + (y - 1)) // y,
        minimum=lambda x, y: Block(torch.minimum(*(torch.as_tensor(_raw(v)) for v in (x, y)))),
        load=load,
        store=store,
        where=where,
        inline_asm_elementwise=_copied,
        reshape=lambda x, shape: Block(x.data.reshape(shape)),
        permute=lambda x, order: Block(x.data.permute(order)),
        split=lambda x: tuple(map(Block, x.data.unbind(-1))),
        join=lambda x, y: Block(torch.stack((x.data, y.data), -1)),
        expand_dims=_expanded,
        convert_layout=lambda x, *_, **__: x,
        zeros_like=lambda x: Block(torch.zeros_like(x.data)),
        rsqrt=lambda x: Block(x.data.rsqrt()),
        abs=lambda x: Block(x.data.abs()),
        sum=lambda x, axis: Block(x.data.sum(axis)),
        max=lambda x, axis: Block(x.data.amax(axis)),
        min=lambda x, axis: Block(x.data.amin(axis)),
    )


def _expanded(x, axis):
    if isinstance(x, Pointer):
        return Pointer(x.memory, x.offset.unsqueeze(axis))
    return Block(x.data.unsqueeze(axis))


class Emulation:
    """Modules whose Gluon functions run on the CPU.

    Args:
        names: Modules that are executed again when one of them or the caller imports them; other
            modules are what they are, except for Gluon.
    """

    def __init__(self, *names):
        self._names, self._modules = names, {}
        nothing = SimpleNamespace(
            jit=lambda f=None, **_: f if f else lambda g: g, constexpr_function=lambda f: f
        )
        barrier = SimpleNamespace(wait=lambda *_: None, arrive=lambda *_, **__: None)
        unused = SimpleNamespace(
            mbarrier=barrier, tma=None, warpgroup_mma=None, warpgroup_mma_wait=None
        )
        self._replaced = {
            "triton.experimental": SimpleNamespace(gluon=nothing),
            "triton.experimental.gluon": SimpleNamespace(language=_language()),
            "triton.experimental.gluon.language.nvidia.hopper": unused,
        }

    def module(self, name):
        """Return a module as a namespace."""
        if name not in self._modules:
            spec = importlib.util.find_spec(name)
            code = compile(Path(spec.origin).read_text(), spec.origin, "exec")
            scope = {"__builtins__": vars(builtins) | {"__import__": self._import}}
            exec(code, scope)
            self._modules[name] = SimpleNamespace(**scope)
        return self._modules[name]

    def _import(self, name, *arguments):
        if name in self._replaced:
            return self._replaced[name]
        if name in self._names:
            return self.module(name)
        return builtins.__import__(name, *arguments)
