"""Runs the persistent decoder kernel in PyTorch, one program and one phase after the other.

Device functions keep their code; Gluon's functions are replaced. Shared memory is a flat buffer in
the order of its layout, so that views of other shapes find what was copied. The warp that streams
weights is a thread of its own, so barriers are waited for.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType, ModuleType, SimpleNamespace

import torch
from triton.runtime.jit import JITFunction

from phyai.triton import persistent_kernel


class Value(torch.Tensor):
    """A tensor with the attribute from which device code reads layouts."""

    type = SimpleNamespace(layout=None)


def value(tensor):
    return tensor.as_subclass(Value)


class Pointer:
    """Elements of a tensor by their number in its memory."""

    def __init__(self, tensor, offset=0):
        self.memory, self.offset = tensor.view(-1), offset
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, offset):
        return Pointer(self.memory, self.offset + offset)

    def value(self):
        """Returns the element where it points."""
        return self.memory[self.offset].item()

    def places(self, mask):
        """Returns element numbers and whether they are asked for; no others may be outside."""
        offset = torch.as_tensor(self.offset)
        mask = torch.ones_like(offset, dtype=torch.bool) if mask is None else mask
        offset, mask = torch.broadcast_tensors(offset, torch.as_tensor(mask))
        assert ((offset >= 0) & (offset < len(self.memory)) | ~mask).all(), "outside of a tensor"
        return torch.where(mask, offset, 0).as_subclass(torch.Tensor), mask


def load(pointer, mask=None, other=0.0, cache_modifier=""):
    if isinstance(pointer.offset, int):
        return pointer.value()
    offset, mask = pointer.places(mask)
    return value(torch.where(mask, pointer.memory[offset], other))


def store(pointer, values, mask=None):
    offset, mask = pointer.places(mask)
    values = torch.as_tensor(values, dtype=pointer.memory.dtype).expand(offset.shape)
    pointer.memory[offset[mask]] = values[mask].as_subclass(torch.Tensor)


def atomic_add(pointer, added, sem, scope):
    assert (sem, scope) == ("acq_rel", "gpu")
    before = pointer.value()
    pointer.memory[pointer.offset] += added
    return before


class Barrier:
    """Completes a phase whenever ``count`` arrivals were seen."""

    def __init__(self):
        self.changed = threading.Condition()
        self.phase, self.count, self.missing = 0, None, None

    def start(self, count):
        self.count = self.missing = count

    def arrive(self, count):
        with self.changed:
            self.missing -= count
            assert self.missing >= 0, "more arrived than are expected"
            if not self.missing:
                self.phase, self.missing = self.phase + 1, self.count
                self.changed.notify_all()

    def wait(self, parity):
        with self.changed:
            done = self.changed.wait_for(lambda: self.phase % 2 != parity, timeout=20)
            assert done, "nobody arrived"


class Shared:
    """Blocks [.., rows, columns] of a flat buffer, 64 columns of all rows after the other."""

    layout = None

    def __init__(self, memory, shape):
        self.memory, self.shape = memory, list(shape)
        assert memory.numel() == torch.Size(shape).numel()

    def _reinterpret(self, dtype, shape, layout):
        return Shared(self.memory, shape)

    def index(self, number):
        assert 0 <= number < self.shape[0]
        return Shared(self.memory.view(self.shape[0], -1)[number], self.shape[1:])

    def blocks(self):
        rows, columns = self.shape
        return self.memory.view(columns // 64, rows, 64)

    def read(self):
        return self.blocks().permute(1, 0, 2).reshape(self.shape).float()

    def permute(self, order):
        assert order == (1, 0)
        return SimpleNamespace(read=lambda: self.read().T)


def copy(target, pointer, mask=None):
    found = load(pointer, mask)
    assert list(found.shape) == target.shape
    target.blocks().copy_(found.view(target.shape[0], -1, 64).permute(1, 0, 2))


def multiply(left, right, total, is_async):
    assert is_async
    left = left.read() if isinstance(left, Shared) else left.float()
    return value(total + left @ right.read())


def _either(ours, theirs):
    def choose(left, right):
        both = isinstance(left, (int, float)) and isinstance(right, (int, float))
        return ours(left, right) if both else theirs(torch.as_tensor(left), torch.as_tensor(right))

    return choose


def _where(condition, left, right):
    if isinstance(condition, bool):
        return left if condition else right
    return torch.where(condition, left, right)


def nothing(*arguments, **options):
    pass


def allocate(dtype, shape, layout):
    if dtype == "int64":
        barriers = [Barrier() for _ in range(shape[0])]
        return SimpleNamespace(index=barriers.__getitem__)
    return Shared(torch.full((torch.Size(shape).numel(),), torch.nan, dtype=torch.bfloat16), shape)


def specialize(partitions, warps, registers):
    assert (len(partitions), warps, len(registers)) == (2, [1], 1)
    (compute, operands), (stream, others) = partitions
    with ThreadPoolExecutor(1) as pool:
        streamed = pool.submit(stream, *others)
        compute(*operands)
        streamed.result()


def arrive(barrier, count, pred=True):
    if pred:
        barrier.arrive(count)


def arrive_by_copies(barrier, increment_count):
    assert not increment_count
    barrier.arrive(32)


def wait_for_products(num_outstanding, deps):
    return deps[0] if len(deps) == 1 else deps


def _language(program, programs):
    language = SimpleNamespace(
        program_id=lambda axis: program, num_programs=lambda axis: programs, load=load, store=store,
        arange=lambda low, high, layout=None: value(torch.arange(low, high)),
        zeros=lambda shape, dtype, layout: value(torch.zeros(shape, dtype=dtype)),
        full=lambda shape, filled, dtype, layout: value(torch.full(shape, filled, dtype=dtype)),
        expand_dims=lambda tensor, axis: tensor.unsqueeze(axis), where=_where,
        minimum=_either(min, torch.minimum), maximum=_either(max, torch.maximum),
        sum=lambda tensor, axis: tensor.sum(axis), max=lambda tensor, axis: tensor.amax(axis),
        exp2=torch.exp2, log2=torch.log2, rsqrt=torch.rsqrt, split=lambda tensor: tensor.unbind(-1),
        convert_layout=lambda tensor, layout: tensor, atomic_add=atomic_add,
        static_range=range, cast=lambda number, dtype: number, float32=torch.float32,
        allocate_shared_memory=allocate, warp_specialize=specialize, int64="int64",
        **dict.fromkeys(("bfloat16", "constexpr"), None),
        **dict.fromkeys(
            ("SliceLayout", "DotOperandLayout", "NVMMASharedLayout", "NVMMADistributedLayout"),
            nothing,
        ),
    )  # fmt: skip
    names = ("wait_group", "commit_group")
    copies = SimpleNamespace(
        async_copy_global_to_shared=copy, mbarrier_arrive=arrive_by_copies,
        **dict.fromkeys(names, nothing),
    )  # fmt: skip
    barriers = SimpleNamespace(
        init=Barrier.start, wait=Barrier.wait, arrive=arrive, MBarrierLayout=nothing
    )
    return {
        "gl": language, "async_copy": copies, "barrier": nothing, "fence_async_shared": nothing,
        "warpgroup_mma": multiply, "warpgroup_mma_wait": wait_for_products, "mbarrier": barriers,
    }  # fmt: skip


def on_host(kernel, stand_ins):
    """Returns the code of a device function and of what it calls, with other globals."""

    def swapped(name, found):
        if name in stand_ins:
            return stand_ins[name]
        if isinstance(found, JITFunction):
            return on_host(found, stand_ins)
        if isinstance(found, ModuleType):
            names = {key: swapped(key, vars(found)[key]) for key in vars(found) if key in used}
            return SimpleNamespace(**names)
        return getattr(found, "value", found)

    used, known = kernel.fn.__code__.co_names, kernel.fn.__globals__
    others = {name: swapped(name, known[name]) for name in used if name in known}
    return FunctionType(kernel.fn.__code__, others, argdefs=kernel.fn.__defaults__)


class HostKernel:
    """Launches the decoder kernel on the host.

    Args:
        weights: tensors that the table of addresses may name.
    """

    def __init__(self, weights):
        self.weights = {weight.data_ptr(): weight.detach() for weight in weights}
        self.phases = []

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.launch(grid[0], arguments, options)

    def launch(self, programs, arguments, options):
        names = persistent_kernel.decoder_kernel.arg_names
        given = dict(zip(names, arguments, strict=False)) | options
        assert given.pop("launch_cooperative_grid")
        assert given.pop("num_warps") == 4
        begin, end = given.pop("begin"), given.pop("end")
        given |= {key: Pointer(one) for key, one in given.items() if torch.is_tensor(one)}
        # A barrier needs programs side by side: here they take turns at every phase.
        for phase in range(begin, end):
            for program in range(programs):
                stand_ins = _language(program, programs) | {"_address": self.address}
                kernel = on_host(persistent_kernel.decoder_kernel, stand_ins)
                kernel(begin=phase, end=phase + 1, **given)
        self.phases.append((begin, end))

    def address(self, table, layer, index):
        return Pointer(self.weights[(table + (layer * 4 + index)).value()])


def enter_on_host(
    x, scale, residual, scaled, squares, counters, width, BLOCK, PARTS, COUNTERS, num_warps
):
    assert BLOCK >= width == x.shape[1]
    assert (PARTS, COUNTERS, num_warps) == (squares.shape[1], len(counters), 4)
    residual.copy_(x)
    scaled.copy_(x.float() * (1 + scale))
    squares.zero_()
    squares[:, 0] = x.float().square().sum(1)
    counters.zero_()
