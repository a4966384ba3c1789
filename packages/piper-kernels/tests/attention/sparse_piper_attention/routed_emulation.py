"""The arithmetic of the routed Hopper kernel, step by step in torch.

One difference: exponentials and logarithms are those of torch, the device has approximations.
"""

import torch

from piper_kernels.attention.sparse_piper_attention._blocks import BLOCK, valid_rows

FORGET, SUM_BITS = 40.0, 23
LOG2_255 = 7.994353436858858


def tile_sums(value):
    """Return 128 times the sums of value codes ``[B, H, D, R]``, int32 ``[B, H, R / 64, D]``."""
    sums = value.unflatten(-1, (-1, BLOCK)).sum(-1, dtype=torch.int32) * 128
    return sums.transpose(-1, -2).contiguous()


def attend(operands, request, routes, rows, lengths=None, first_block=0, blocks=None):
    """Return FP32 ``[B, 64 * blocks, Hq, D]`` of prepared operands."""
    batch, heads, stored, head_dim = operands.query.shape
    tiles = stored // BLOCK
    blocks = tiles - first_block if blocks is None else blocks
    valid = valid_rows(rows, lengths, operands.query.device)
    keys = [BLOCK] * tiles if valid is None else valid.sum(-1).tolist()
    sums = tile_sums(operands.value)
    output = torch.empty(batch, heads, blocks, BLOCK, head_dim)
    for b in range(batch):
        for h in range(heads):
            for i in range(blocks):
                block = first_block + i
                active = tile_list(request, routes, b, h, block, tiles)
                output[b, h, i] = attend_block(operands, sums, b, h, block, active, keys)
    return output.permute(0, 2, 3, 1, 4).flatten(1, 2)


def tile_list(request, routes, b, h, block, tiles):
    """Return the key tiles of a query block."""
    layout = request.layout
    if layout.keeps_all or block >= request.routed_blocks(tiles):
        return list(range(tiles))
    kept = routes[b, block, layout.offsets[h] : layout.offsets[h + 1]].tolist()
    return [*kept, *range(layout.blocks, tiles)]


def attend_block(operands, sums, b, h, block, active, keys):
    """Return FP32 ``[64, D]``, the attention of one query block."""
    kv = h // (operands.query.shape[1] // operands.key.shape[1])
    rows = slice(block * BLOCK, (block + 1) * BLOCK)
    query = operands.query[b, h, rows].to(torch.int32)
    q_scale = operands.query_scale[b, h, 2 * block : 2 * block + 2].repeat_interleave(32)[:, None]
    numerator = torch.zeros(BLOCK, operands.query.shape[3], dtype=torch.int32)
    denominator, code_sum = torch.zeros(BLOCK, 1), torch.zeros(BLOCK, 1)
    coordinate = torch.full((BLOCK, 1), -torch.inf)
    exponent = torch.zeros(BLOCK, 1)
    for start in range(0, len(active), 2):
        pair = active[start : start + 2]
        tiles = []
        for t in pair:
            key = operands.key[b, kv, t * BLOCK : t * BLOCK + keys[t]].to(torch.int32)
            scores = (query @ key.T).contiguous()
            scale = q_scale * operands.key_scale[b, kv, t]
            largest = scores.amax(-1, keepdim=True)
            tiles.append((t, scores, scale, largest, largest.float() * scale))
        top = torch.stack([score for *_, score in tiles]).amax(0)
        multipliers = [operands.value_multiplier[b, kv, t, 0] for t in pair]
        offset = torch.stack(
            [tile[4] - top + m.log2() for tile, m in zip(tiles, multipliers, strict=True)]
        ).amax(0)
        coordinate, exponent, forget, rise = raised_coordinate(
            top, offset - LOG2_255, coordinate, exponent, code_sum
        )
        fade = torch.where(forget, 0.0, torch.exp2(-rise))
        shift = torch.where(forget, 31.0, rise.clamp(0, 31)).to(torch.int32)
        factor = torch.where(forget, 1.0, torch.exp2((-rise).clamp(min=0))).to(torch.int32)
        numerator = (numerator >> shift) * factor
        denominator, code_sum = denominator * fade, code_sum * fade + 64
        for (t, scores, scale, largest, score), multiplier in zip(tiles, multipliers, strict=True):
            weight = torch.exp2((score - coordinate) - exponent)
            p = torch.exp2((scores - largest).float() * scale)
            codes = (p * (weight * multiplier)).round()
            assert codes.max() <= 255
            signed = codes.to(torch.int32) - 128
            value = operands.value[b, kv, :, t * BLOCK : t * BLOCK + keys[t]].to(torch.int32)
            rest = operands.value[b, kv, :, t * BLOCK + keys[t] : (t + 1) * BLOCK].to(torch.int32)
            product = signed @ value.T - 128 * rest.sum(-1)
            exact = numerator.long() + product + sums[b, kv, t]
            assert exact.abs().max() < 2**31
            numerator = exact.to(torch.int32)
            total = p.sum(-1, keepdim=True)
            denominator = denominator + total * weight
            code_sum = code_sum + total * (weight * multiplier)
    inverse = 1 / (denominator.clamp(min=1e-30) * 255)
    return numerator.float() * inverse + operands.value_mean[b, kv]


def raised_coordinate(top, offset, coordinate, exponent, code_sum):
    """Return coordinate, exponent, whether the past is forgotten and the whole-numbered rise."""
    rise = (top - coordinate) + (offset - exponent)
    forget = rise > FORGET
    lowest = (code_sum.view(torch.int32) >> 23) - (126 + SUM_BITS)
    rise = torch.maximum(rise.ceil(), lowest.float())
    exponent = torch.where(forget, offset.ceil(), exponent + rise)
    return torch.where(forget, top, coordinate), exponent, forget, rise
