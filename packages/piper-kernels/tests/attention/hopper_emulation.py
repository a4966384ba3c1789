"""The arithmetic of the Hopper attention kernel step by step in PyTorch, and its storage.

Written from the storage alone: permuted and transposed values, biased code sums, pairs of 64-key
tiles, signed codes, FP32 operations in the order of the kernel.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from piper_kernels.attention._quantization import Granularity
from piper_kernels.attention.piper_attention import prepared

MAGIC = 12582912.0
MAGIC_BITS = 0x4B400000
PERMUTATION = [16 * (s // 16) + 8 * (s % 4 // 2) + 2 * (s % 16 // 4) + s % 2 for s in range(32)]
MAX_STEP = 2.0**-8
DROP = 60.0
LOG2_448 = math.log2(448)
LOG2_255 = math.log2(255)
LOG2_254 = math.log2(254)


def permute_keys(codes):
    """Permute the last dimension within groups of 32."""
    order = torch.arange(codes.shape[-1]).view(-1, 32)[:, PERMUTATION].flatten()
    return codes.view(torch.int8)[..., order].contiguous().view(codes.dtype)


def biased_sums(sums):
    """Return 127 times code sums ``[..., pairs, D]`` as bits of biased FP32 numbers.

    Products of odd pairs are negative: they start at ``-1.5 * 2**23``.
    """
    odd = torch.arange(sums.shape[-2], device=sums.device)[:, None] % 2 == 1
    return torch.where(odd, MAGIC_BITS - 2**31 - 127 * sums, MAGIC_BITS + 127 * sums).int()


def piper_storage(query, key, value, *, scale=None, is_causal=False, per_key=None):
    """Return what the loop reads, made from the portable preparation.

    ``per_key`` scales of values are the default of causal attention; otherwise 64 keys share one.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    p = prepared.prepare(query, key, value, scale=scale, is_causal=is_causal, padded=True)
    kv = p.key_value
    codes, multiplier = kv.value_codes, kv.value_multiplier
    value_scale = multiplier / 255
    if not (is_causal if per_key is None else per_key):
        centered = value.float() - (0.0 if is_causal else kv.value_mean[:, :, None])
        tiles = functional.pad(centered, (0, 0, 0, -value.shape[2] % 64)).unflatten(2, (-1, 64))
        value_scale = tiles.abs().amax((-2, -1)) / 127 + 1e-7
        codes = (tiles / value_scale[..., None, None]).round().clamp(-127, 127)
        codes = codes.flatten(2, 3).to(torch.int8).mT.contiguous()
        multiplier = None
    else:
        value_scale = value_scale.unflatten(-1, (-1, 64)).amax(-1)
    pairs = functional.pad(codes.int(), (0, -codes.shape[-1] % 128)).unflatten(-1, (-1, 128))
    sums = biased_sums(pairs.sum(-1, dtype=torch.int32).mT)
    return {
        "query_codes": p.query_codes,
        "query_scale": p.query_scale,
        "key_codes": kv.key_codes,
        "key_scale": kv.key_scale,
        "value_codes": permute_keys(codes),
        "value_vector": kv.value_mean,
        "multiplier": multiplier,
        "log_max": value_scale.log2().contiguous(),
        "sums": sums.contiguous(),
    }


def sage_storage(query, key, value, *, scale=None):
    """Return what the loop reads for E4M3 values."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    codes, row_scale = prepared.prepare_query(
        query, scale=scale, granularity=Granularity.PER_WARP, padded=True
    )
    kv = prepared.prepare_key_value(key, value, is_causal=True, padded=True)
    value = value.float()
    value_scale = value.abs().amax(-2) / 2.25 + 1e-7
    quotient = functional.pad(value / value_scale[..., None, :], (0, 0, 0, -value.shape[2] % 64))
    return {
        "query_codes": codes,
        "query_scale": row_scale,
        "key_codes": kv.key_codes,
        "key_scale": kv.key_scale,
        "value_codes": permute_keys(quotient.to(torch.float8_e4m3fn).mT.contiguous()),
        "value_vector": value_scale,
    }


def fma(a, b, c):
    """Return FP32 ``a * b + c``, rounded once up to the double rounding of FP64."""
    return (a.double() * b.double() + c.double()).float()


@dataclass(frozen=True)
class Operands:
    """What the loop reads, for every query head, with whole pairs of key tiles in order of keys."""

    query: Tensor
    query_scale: Tensor
    key: Tensor
    key_scale: Tensor
    value: Tensor
    multiplier: Tensor | None
    log_max: Tensor | None
    sums: Tensor | None

    @property
    def is_fp8(self):
        return self.sums is None

    @classmethod
    def of(cls, storage):
        heads, stored_queries = storage["query_codes"].shape[1:3]
        kv_heads, stored_keys = storage["key_codes"].shape[1:3]
        padding = -stored_keys % 128
        of_head = {
            name: tensor.repeat_interleave(heads // kv_heads, 1)
            for name, tensor in storage.items()
            if tensor is not None and not name.startswith("query")
        }
        codes = of_head["value_codes"]
        natural = torch.empty_like(codes.view(torch.int8))
        order = torch.arange(stored_keys).view(-1, 32)[:, PERMUTATION].flatten()
        natural[..., order] = codes.view(torch.int8)
        value = functional.pad(natural.view(codes.dtype).double(), (0, padding)).mT
        return cls(
            storage["query_codes"].double(),
            storage["query_scale"].repeat_interleave(32, -1)[..., :stored_queries, None],
            functional.pad(of_head["key_codes"].double(), (0, 0, 0, padding)),
            functional.pad(of_head["key_scale"], (0, padding // 64)),
            value,
            of_head.get("multiplier"),
            of_head.get("log_max"),
            of_head.get("sums"),
        )

    def multiplier_of(self, at, fill=0.0):
        """Return the multipliers of a slice of keys, ``[B, Hq, 1, keys]``."""
        padding = self.key.shape[2] - self.multiplier.shape[-1]
        return functional.pad(self.multiplier, (0, padding), value=fill)[..., None, at]


@dataclass(frozen=True)
class Tile:
    """Scores of all queries and 64 keys; the coordinate of a row is ``scaled`` and ``log``."""

    at: slice
    scores: Tensor
    scale: Tensor
    largest: Tensor
    scaled: Tensor
    log: Tensor
    visible: Tensor

    @classmethod
    def of(cls, o, tile, keys, is_causal):
        at = slice(64 * tile, 64 * tile + 64)
        row = torch.arange(o.query.shape[2])[:, None]
        scores = o.query @ o.key[:, :, at].mT
        visible = torch.arange(at.start, at.stop)[None] < keys
        if is_causal:
            visible = visible & (torch.arange(at.start, at.stop)[None] <= row)
        scores = scores.masked_fill(~visible, -(2.0**30))
        scale = o.query_scale * o.key_scale[..., tile, None, None]
        largest = scores.amax(-1, keepdim=True)
        scaled = torch.where(largest == -(2.0**30), -math.inf, largest.float() * scale)
        log = torch.full((1,), -LOG2_448)
        if not o.is_fp8 and tile < o.log_max.shape[-1]:
            log = o.log_max[..., tile, None, None]
        elif not o.is_fp8:
            log = torch.zeros(1)
        if is_causal and o.multiplier is not None:
            # The kernel does so for the last pair of a row; in others all keys are visible.
            own = o.multiplier_of(at, fill=1e-9).log2() - LOG2_255
            own = own.masked_fill(~visible, -math.inf).amax(-1, keepdim=True)
            log = torch.where(tile // 2 == row // 128, own, log)
        return cls(at, scores, scale, largest, scaled, log.expand_as(largest), visible)


def half_codes(p, factor, sign):
    """Return the low bytes of ``p * factor - 127 * sign`` rounded as FP16 numbers near 1536 are."""
    wide = p.half().double() * factor.half().double() + (1536 - 127 * sign)
    return (wide.round() - 1536 + 128) % 256 - 128


def encode(o, tile, score, log, sign, exact):
    """Return the codes of probabilities at a coordinate, and the sums of rows.

    ``exact`` rows take the scales of the keys that they see instead of the one of their tile.
    """
    scaled = ~exact & (not o.is_fp8)
    steep = o.query_scale.amax() * o.key_scale.amax() > MAX_STEP
    added = torch.where(scaled, tile.log, 0.0)
    if steep:
        start = (tile.scaled - score) + (added - log)
        exponent = fma(tile.scores - tile.largest, tile.scale, start)
    else:
        start = fma(torch.tensor(-MAGIC), tile.scale, added - (score + log))
        exponent = fma(tile.scores + MAGIC, tile.scale, start)
    p = torch.where(tile.visible, torch.exp2(exponent), 0.0)
    if o.is_fp8:
        return p.clamp(max=448).to(torch.float8_e4m3fn).double(), p.sum(-1, keepdim=True)
    if o.multiplier is None:
        codes = half_codes(p, torch.tensor(254.0 * sign), sign)
        unit = torch.exp2(-LOG2_254 - tile.log)
        return codes, (codes * sign + 127).sum(-1, keepdim=True).float() * unit
    factor = o.multiplier_of(tile.at) * (sign * (254 / 255))
    biased = fma(p, factor, torch.tensor(MAGIC - 127 * sign))
    codes = (biased.contiguous().view(torch.int32) << 24 >> 24).double()
    unit = torch.exp2(-tile.log)
    codes = torch.where(exact, codes, half_codes(p, factor * unit, sign))
    return codes, p.sum(-1, keepdim=True) * torch.where(exact, 1.0, unit)


def attend(storage, queries, keys, *, is_causal=False):
    """Return FP32 attention of all queries ``[B, Hq, queries, D]``, as the kernel computes it."""
    o = Operands.of(storage)
    row = torch.arange(o.query.shape[2])[:, None]
    state = o.query.shape[:3]
    output = torch.zeros(o.query.shape)
    bias, denominator = torch.zeros(*state, 1), torch.zeros(*state, 1)
    coordinate = torch.full((*state, 1), -math.inf)
    top, offset, top_offset = coordinate, denominator, denominator
    last_key = (row // 64 * 64 + 63).clamp(max=keys - 1) if is_causal else torch.tensor(keys - 1)
    for pair in range(-(-keys // 128)):
        exact = (pair == last_key // 128) & (o.multiplier is not None)
        sign = -1.0 if pair % 2 else 1.0
        tiles = [Tile.of(o, tile, keys, is_causal) for tile in (2 * pair, 2 * pair + 1)]
        first, last = tiles
        second = (last.scaled - first.scaled) + (last.log - first.log) > 0
        score = torch.where(second, last.scaled, first.scaled)
        log = torch.where(second, last.log, first.log)
        rise = (score - top) + (log - top_offset)
        top = torch.where(rise > 0, score, top)
        top_offset = torch.where(rise > 0, log, top_offset)
        far = rise < -DROP
        score = torch.where(far, top, score)
        log = torch.where(far, top_offset - DROP, log)
        weight = torch.exp2((coordinate - score) + (offset - log))
        total, product = torch.zeros(*state, 1), torch.zeros(o.query.shape, dtype=torch.float64)
        for tile in tiles:
            codes, part = encode(o, tile, score, log, sign, exact)
            total += part
            product += codes @ o.value[:, :, tile.at]
        before = (output, bias, denominator, coordinate, offset)
        if not o.is_fp8:
            biased = product.to(torch.int32) + o.sums[:, :, pair, None]
            product = biased.view(torch.float32).double()
            bias = fma(bias, weight, torch.tensor(sign * MAGIC))
        output = fma(output, weight, product)
        denominator = fma(denominator, weight, total)
        after = (output, bias, denominator, score, log)
        visited = (pair <= row // 128) | (not is_causal)
        output, bias, denominator, coordinate, offset = (
            torch.where(visited, new, old) for new, old in zip(after, before, strict=True)
        )
    output = (output - bias) / denominator.clamp(min=1e-30)
    vector = storage["value_vector"]
    if vector is not None:
        vector = vector.repeat_interleave(state[1] // vector.shape[1], 1)[:, :, None]
    output = output * vector if o.is_fp8 else output / 254 + (0.0 if vector is None else vector)
    return output[:, :, :queries]
