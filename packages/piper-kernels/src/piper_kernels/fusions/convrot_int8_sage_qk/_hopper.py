"""Launches of the product on Hopper whose tiles leave encoded. Importing needs Gluon."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false

from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from piper_kernels._triton.addresses import Address
from piper_kernels._triton.launching import Launcher, are_aligned, launch_key
from piper_kernels._triton.runtime import launch_guard
from piper_kernels._triton.targets import sm_count
from piper_kernels.attention._preparation._launch import Values
from piper_kernels.attention._quantization import Granularity
from piper_kernels.fusions.convrot_int8_sage_qk import _hopper_blocks, _hopper_kernel
from piper_kernels.fusions.convrot_int8_sage_qk.operands import HeadProjection, PreparedInput
from piper_kernels.fusions.projected_qk._launch import SUMMARIES, KeyEncoder, QueryEncoder
from piper_kernels.fusions.projected_qk.transform import HeadTransform
from piper_kernels.fusions.projected_value._launch import ValueEncoder
from piper_kernels.linear.convrot.int8._nvidia.hopper import (
    COPY_REGISTERS,
    code_descriptor,
    max_registers,
    store_layout,
)
from piper_kernels.linear.convrot.int8._nvidia.hopper_plan import PAIR
from piper_kernels.linear.convrot.int8._plan import ceil_div

Encoder = QueryEncoder | KeyEncoder | ValueEncoder

QUERIES, KEYS, VALUES = (
    int(kind.value) for kind in (_hopper_blocks.QUERIES, _hopper_blocks.KEYS, _hopper_blocks.VALUES)
)
_ROTARY_MULTIPLE = 32
# Of a step of a program that has the multiprocessor to itself, about.
STEP_CYCLES = 500
_BLOCK = 64
ANGLE_BLOCK = [64, 64]

_encode = Launcher(_hopper_kernel.hopper_encode_kernel)


@cache
def block_layout(kind: int, head_dim: int) -> gl.DistributedLinearLayout:
    """Return the layout in which 64 rows of a head are stored.

    Threads hold 16 bytes side by side: of a row of two-code words or of keys, or 16 rows of two
    features of values, of which a warp stores 64 rows of 16 features.
    """
    if kind != VALUES:
        columns = head_dim // 2 if kind == QUERIES else head_dim
        return store_layout(_BLOCK, columns, PAIR.num_warps)
    wide = [[0, 32]] if head_dim == 128 else []
    return gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [2, 0], [4, 0], [8, 0], *wide],
        lane_bases=[[16, 0], [32, 0], [0, 1], [0, 2], [0, 4]],
        warp_bases=[[0, 8], [0, 16]],
        block_bases=[],
        shape=[_BLOCK, head_dim // 2],
    )


@dataclass(frozen=True)
class _Heads:
    """What the kernel makes of heads.

    Attributes:
        kind: ``QUERIES``, ``KEYS`` or ``VALUES``.
        targets: Codes, scales, keys, partial sums and both summaries; ``None`` where there are
            none.
        summary: How blocks are summarized, or whether values have means of blocks.
        transform: Of queries and keys.
        mean: Of values.
        factor: Of the scales of queries.
    """

    kind: int
    targets: tuple[Tensor | None, ...]
    summary: int
    transform: HeadTransform | None = None
    mean: Tensor | None = None
    factor: float = 1.0

    def of_batch(self, index: int) -> "_Heads":
        """Return the part of one batch."""

        def part(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[index : index + 1]

        targets = tuple(part(tensor) for tensor in self.targets)
        return replace(self, targets=targets, mean=part(self.mean))

    @classmethod
    def of(cls, encoder: Encoder) -> "_Heads":
        """Return what an encoder stands for."""
        if isinstance(encoder, ValueEncoder):
            means = encoder.block_means
            targets = (encoder.codes, encoder.multiplier, None, None, means, None)
            return cls(VALUES, targets, int(means is not None), mean=encoder.mean)
        summary = SUMMARIES[encoder.mode].value
        if isinstance(encoder, QueryEncoder):
            codes = encoder.codes.view(torch.int16)
            targets = (codes, encoder.scale, None, None, encoder.summary, None)
            return cls(QUERIES, targets, summary, encoder.transform, factor=encoder.factor)
        sums = (encoder.partials, encoder.summary, encoder.auxiliary)
        return cls(KEYS, (None, None, encoder.keys, *sums), summary, encoder.transform)


@lru_cache(maxsize=4096)
def _angle_descriptor(start: int, rows: int, rotary: int) -> TensorDescriptor:
    """Return the TMA description of FP32 ``[rows, rotary]`` at an address, read in tiles."""
    address = Address(start, torch.float32)
    return TensorDescriptor(address, [rows, rotary], [rotary, 1], ANGLE_BLOCK, angle_layout())


@cache
def angle_layout() -> gl.NVMMASharedLayout:
    """Return the shared-memory layout of a tile of angles."""
    return gl.NVMMASharedLayout.get_default_for(ANGLE_BLOCK, gl.float32)


def supports(encoder: Encoder) -> bool:
    """Return whether the kernel has a form for an encoder; others need windows."""
    if isinstance(encoder, ValueEncoder):
        return encoder.values is Values.PER_TILE
    tables = (encoder.transform.cos, encoder.transform.sin)
    if tables[0].shape[1] % _ROTARY_MULTIPLE or not are_aligned(*tables):
        return False
    return isinstance(encoder, KeyEncoder) or encoder.granularity is Granularity.PER_WARP


def encode(inputs: PreparedInput, projection: HeadProjection, encoder: Encoder) -> None:
    """Project all rows and leave in the encoder what its windows would leave there."""
    heads, lengths = _Heads.of(encoder), encoder.sequence.lengths
    batch, rows, _ = inputs.qdata.shape
    if batch == 1 or rows % PAIR.block_m == 0:
        _launch(inputs, projection, heads, lengths)
        return
    for index in range(batch):  # a tile has rows of one sequence
        part = PreparedInput(inputs.qdata[index : index + 1], inputs.scale[index : index + 1])
        _launch(part, projection, heads.of_batch(index), lengths)


def _launch(
    inputs: PreparedInput, projection: HeadProjection, heads: _Heads, lengths: Tensor | None
) -> None:
    batch, rows, features = inputs.qdata.shape
    width, bias, device = projection.head_dim, projection.bias, inputs.qdata.device
    outputs = projection.qdata.shape[0]
    rotary, angles, weight, eps = _ROTARY_MULTIPLE, (None, None), None, 1.0
    if heads.transform is not None:
        transform = heads.transform
        weight, eps, rotary = transform.weight, transform.eps, transform.cos.shape[1]
        angles = tuple(
            _angle_descriptor(table.data_ptr(), rows, rotary)
            for table in (transform.cos, transform.sin)
        )
    given = (bias, weight, heads.mean, lengths, *heads.targets)
    tensors = (inputs.scale, projection.scale)
    tensors += tuple(inputs.scale if tensor is None else tensor for tensor in given)
    tile = (PAIR.block_m, PAIR.block_k)
    x_desc = code_descriptor(inputs.qdata.data_ptr(), batch * rows, features, features, *tile)
    tile = (PAIR.block_n, PAIR.block_k)
    w_desc = code_descriptor(projection.qdata.data_ptr(), outputs, features, features, *tile)
    stride = 1 if bias is None else bias.stride(0)
    units = batch * ceil_div(rows, PAIR.block_m) * ceil_div(outputs, PAIR.block_n)
    programs = min(units, sm_count(device) * PAIR.programs_per_sm)
    delay = STEP_CYCLES * ceil_div(features, PAIR.block_k) if units >= 2 * programs else 0
    numbers = (batch, rows, projection.heads, features, stride, eps, heads.factor, delay)
    constants = (heads.kind, width, rotary, heads.summary, PAIR.stages, PAIR.group_m)
    flags = (bias is not None, weight is not None, lengths is not None)
    key = launch_key(tensors, rows >> 31, features, stride, constants, flags)
    layout = block_layout(heads.kind, width)
    with launch_guard(device):
        _encode(
            programs,
            (
                x_desc,
                w_desc,
                *angles,
                *tensors,
                *numbers,
                *constants,
                layout,
                *flags,
                COPY_REGISTERS,
            ),
            {"num_warps": PAIR.num_warps, "maxnreg": max_registers(PAIR)},
            key,
        )
