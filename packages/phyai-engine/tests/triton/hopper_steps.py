"""Operands, references and steps of the bf16 products for Hopper, in PyTorch and Python."""

from types import FunctionType, SimpleNamespace

import torch
import triton
from torch.nn import functional

from phyai.triton import gated_product as gated
from phyai.triton import gated_product_kernel as gated_kernels
from phyai.triton import hopper_gemm_kernel as gemm_kernels
from phyai.triton import hopper_operands, hopper_tiles

BLOCK_M, BLOCK_K, BLOCK_H = hopper_operands.BLOCK_M, hopper_operands.BLOCK_K, gated.BLOCK_H


def on_host(kernel, **more):
    """Returns the code of a device function with PyTorch and Python instead of Gluon."""
    stand_ins = {"gl": SimpleNamespace(minimum=min, exp2=torch.exp2), **more}
    return FunctionType(kernel.fn.__code__, {**kernel.fn.__globals__, **stand_ins})


tile_position = on_host(hopper_tiles.tile_position)
unit_position = on_host(gemm_kernels.unit_position, tile_position=tile_position)
activate = on_host(gated_kernels.activate)


def operands(rows, columns, depth, device="cpu", scale=1.0):
    generator = torch.Generator(device).manual_seed(rows + columns)
    shapes = ((rows, depth), (columns, depth))
    x, weight = (torch.randn(s, generator=generator, device=device) for s in shapes)
    return (x * scale).bfloat16(), (weight * depth**-0.5).bfloat16()


def activated(values, kind):
    values = values.float()
    if kind == "silu":
        return functional.silu(values)
    return functional.gelu(values, approximate="tanh")


def gated_reference(x, weight, kind):
    gate, up = (x.float() @ weight.float().T).chunk(2, dim=-1)
    return activated(gate, kind) * up


def assert_near(found, wanted):
    """Asserts what rounding to bf16 leaves."""
    error = found.float() - wanted
    assert error.norm() / wanted.norm() < 3e-3
    assert error.abs().max() < 0.02 * wanted.abs().max()


def tile(source, first_row, rows, step):
    """Returns what TMA writes of a step: zeros outside of the operand."""
    part = source[first_row : first_row + rows, step * BLOCK_K : (step + 1) * BLOCK_K].float()
    return functional.pad(part, (0, BLOCK_K - part.shape[1], 0, rows - part.shape[0]))


def store(out, values, first_row, first_column):
    """Writes the part of a tile that lies inside, where nothing was written before."""
    target = out[first_row:, first_column:][: values.shape[0], : values.shape[1]]
    assert target.isnan().all()
    target.copy_(values[: target.shape[0], : target.shape[1]])


def units_of(count, programs=5):
    """Yields all units, program after program."""
    programs = min(count, programs)
    for program in range(programs):
        yield from range(program, count, programs)


def gated_steps(x, weight, kind):
    """Does what the programs of the gated product do, and returns the output."""
    rows, steps = x.shape[0], x.shape[1] // BLOCK_K
    hidden = weight.shape[0] // 2
    row_tiles, column_tiles = triton.cdiv(rows, BLOCK_M), hidden // BLOCK_H
    group = hopper_operands.group_size(row_tiles)
    out = torch.full((rows, hidden), torch.nan, dtype=torch.bfloat16)
    for unit in units_of(row_tiles * column_tiles):
        row_tile, column_tile = tile_position(unit, row_tiles, column_tiles, group)
        total = torch.zeros(BLOCK_M, 2 * BLOCK_H)
        for step in range(steps):
            parts = [
                tile(weight, part * hidden + column_tile * BLOCK_H, BLOCK_H, step)
                for part in range(2)
            ]
            total += tile(x, row_tile * BLOCK_M, BLOCK_M, step) @ torch.cat(parts).T
        gate, up = total.view(BLOCK_M, 2, BLOCK_H).permute(0, 2, 1).unbind(2)
        values = (activate(gate, gated.KINDS[kind]) * up).bfloat16()
        store(out, values, row_tile * BLOCK_M, column_tile * BLOCK_H)
    return out


def gemm_steps(x, weight, bias, plan):
    """Does what the programs of the plain product and of its sum do, and returns the output."""
    (rows, depth), columns = x.shape, weight.shape[0]
    row_tiles, column_tiles = triton.cdiv(rows, BLOCK_M), triton.cdiv(columns, plan.block_n)
    group, steps = hopper_operands.group_size(row_tiles), triton.cdiv(depth, BLOCK_K)
    parts = torch.full((plan.splits, rows, columns), torch.nan)
    for unit in units_of(row_tiles * column_tiles * plan.splits):
        row_tile, column_tile, part, first, last = unit_position(
            unit, row_tiles, column_tiles, group, steps, plan.splits
        )
        total = torch.zeros(BLOCK_M, plan.block_n)
        for step in range(first, last):
            left = tile(x, row_tile * BLOCK_M, BLOCK_M, step)
            total += left @ tile(weight, column_tile * plan.block_n, plan.block_n, step).T
        store(parts[part], total, row_tile * BLOCK_M, column_tile * plan.block_n)
    return (parts.sum(0) + bias.float()).bfloat16()
