"""Runs Gluon functions as plain Python on CPU tensors: their maths and indices, no layouts."""

import ast
from pathlib import Path
from types import SimpleNamespace

import torch


class Values(torch.Tensor):
    """A tensor with the methods of kernels."""

    def to(self, dtype, bitcast=False):
        return self.view(dtype) if bitcast else super().to(dtype)


def values(tensor):
    return tensor.as_subclass(Values)


class Pointer:
    """Elements of a flat tensor, a tensor of them after an addition."""

    def __init__(self, flat, offset=0):
        self.flat, self.offset = flat, offset
        self.dtype = SimpleNamespace(element_ty=flat.dtype)

    def __add__(self, offset):
        return Pointer(self.flat, self.offset + offset)

    def _places(self, mask):
        offset = torch.as_tensor(self.offset).as_subclass(torch.Tensor).long()
        mask = torch.as_tensor(True if mask is None else mask).as_subclass(torch.Tensor)
        return offset, mask.expand(offset.shape)

    def load(self, mask=None, other=0.0):
        offset, mask = self._places(mask)
        assert ((offset >= 0) & (offset < len(self.flat)))[mask].all()
        found = self.flat[torch.where(mask, offset, 0)]
        return values(torch.where(mask, found, torch.tensor(other, dtype=found.dtype)))

    def store(self, content, mask=None):
        offset, mask = self._places(mask)
        assert ((offset >= 0) & (offset < len(self.flat)))[mask].all()
        self.flat[offset[mask]] = content.as_subclass(torch.Tensor)[mask]


class SharedMemory:
    """A buffer in shared memory, views included."""

    def __init__(self, tensor):
        self.tensor = tensor

    def index(self, at):
        return SharedMemory(self.tensor[at])

    def slice(self, start, length):
        return SharedMemory(self.tensor[start : start + length])

    def permute(self, order):
        return SharedMemory(self.tensor.permute(order))

    def store(self, content):
        assert self.tensor.shape == content.shape
        assert self.tensor.dtype == content.dtype
        self.tensor.copy_(content)

    def load(self, layout):
        return values(self.tensor.clone())


def fma(a, b, c):
    return (a.double() * b.double() + c.double()).float()


def split_reciprocal(scale):
    first = 1 / scale
    return first, ((1 - scale.double() * first.double()) * first.double()).float()


def inline_asm_elementwise(assembly, constraints, arguments, **_):
    functions = {"ex2": torch.exp2, "rcp": torch.reciprocal}
    return functions[assembly.split(".")[0]](*arguments)


class Language(SimpleNamespace):
    """``triton.experimental.gluon.language`` for one program."""

    def __init__(self, program):
        nothing = lambda *_, **__: None  # noqa: E731
        super().__init__(
            arange=lambda start, end, layout=None: values(torch.arange(start, end).int()),
            program_id=lambda axis: values(torch.tensor(program, dtype=torch.int32)),
            num_warps=lambda: 4,
            load=lambda pointer, mask=None, other=0.0: pointer.load(mask, other),
            store=lambda pointer, content, mask=None: pointer.store(content, mask),
            allocate_shared_memory=lambda dtype, shape, layout: SharedMemory(
                torch.full(shape, torch.nan, dtype=dtype)
            ),
            zeros=lambda shape, dtype, layout: values(torch.zeros(shape, dtype=dtype)),
            expand_dims=lambda x, axis: x.unsqueeze(axis),
            reshape=lambda x, shape: x.reshape(shape),
            permute=lambda x, order: x.permute(order),
            split=lambda x: x.unbind(-1),
            join=lambda a, b: torch.stack((a, b), -1),
            convert_layout=lambda x, layout, assert_trivial=False: x,
            where=torch.where,
            minimum=lambda x, bound: x.clamp(max=bound),
            maximum=lambda x, bound: x.clamp(min=bound),
            inline_asm_elementwise=inline_asm_elementwise,
            fma=fma,
            constexpr=lambda value: value,
            SliceLayout=nothing,
            DotOperandLayout=nothing,
            NVMMADistributedLayout=nothing,
            **{
                name: getattr(torch, name)
                for name in ("int16", "int32", "int64", "float16", "bfloat16", "float32")
            },
        )


def emulated(modules, program):
    """Return the functions of Gluon modules for one program, by name."""
    names = {
        "gluon": SimpleNamespace(jit=lambda function: function),
        "gl": Language(program),
        "mma_v2": lambda a, b, sums: sums + a.float() @ b.float(),
        "split_reciprocal": split_reciprocal,
    }
    for module in modules:
        tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
        tree.body = [node for node in tree.body if not isinstance(node, ast.ImportFrom)]
        exec(compile(tree, module.__file__, "exec"), names)  # a file of this project
    return names
