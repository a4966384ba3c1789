"""The arithmetic of the Hopper attention kernel step by step in PyTorch, and its storage.

Written from the storage alone: permuted and transposed values, biased code sums, pairs of 64-key
tiles, signed codes, FP32 operations in the order of the kernel.
"""

import math

import torch
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


def attend(storage, queries, keys, *, is_causal=False):  # noqa: C901  # one step after another
    """Return FP32 attention of all queries ``[B, Hq, queries, D]``, as the kernel computes it."""
    s = storage
    batch, heads, stored_queries, head_dim = s["query_codes"].shape
    kv_heads, stored_keys = s["key_codes"].shape[1:3]
    groups = heads // kv_heads
    fp8, per_key = "sums" not in s, s.get("multiplier") is not None
    padding = -stored_keys % 128
    of_head = {
        name: tensor.repeat_interleave(groups, 1)
        for name, tensor in s.items()
        if tensor is not None and not name.startswith("query")
    }
    query = s["query_codes"].double()
    q_scale = s["query_scale"].repeat_interleave(32, -1)[..., :stored_queries, None]
    key = functional.pad(of_head["key_codes"].double(), (0, 0, 0, padding))
    k_scale = functional.pad(of_head["key_scale"], (0, padding // 64))
    natural = torch.empty_like(of_head["value_codes"].view(torch.int8))
    order = torch.arange(stored_keys).view(-1, 32)[:, PERMUTATION].flatten()
    natural[..., order] = of_head["value_codes"].view(torch.int8)
    value = natural.view(of_head["value_codes"].dtype).double()
    value = functional.pad(value, (0, padding)).mT
    row = torch.arange(stored_queries)[:, None]
    state = (batch, heads, stored_queries)
    output = torch.zeros(*state, head_dim)
    bias, denominator = torch.zeros(*state, 1), torch.zeros(*state, 1)
    coordinate = torch.full((*state, 1), -math.inf)
    top, offset, top_offset = coordinate, denominator, denominator
    for pair in range(-(-keys // 128)):
        scores, scales, scaled, largest, logs, visible = [], [], [], [], [], []
        sign = -1.0 if pair % 2 else 1.0
        for tile in (2 * pair, 2 * pair + 1):
            at = slice(64 * tile, 64 * tile + 64)
            x = query @ key[:, :, at].mT
            seen = torch.arange(at.start, at.stop)[None] < keys
            if is_causal:
                seen = seen & (torch.arange(at.start, at.stop)[None] <= row)
            x = x.masked_fill(~seen, -(2.0**30))
            scale = q_scale * k_scale[..., tile, None, None]
            most = x.amax(-1, keepdim=True)
            log = torch.full((1,), -LOG2_448)
            if not fp8 and tile < of_head["log_max"].shape[-1]:
                log = of_head["log_max"][..., tile, None, None]
            elif not fp8:
                log = torch.zeros(1)
            if is_causal and per_key:
                # The kernel does so for the last pair of a row; in others all keys are visible.
                multiplier = functional.pad(of_head["multiplier"], (0, padding), value=1e-9)
                own = (multiplier[..., None, at].log2() - LOG2_255).masked_fill(~seen, -math.inf)
                log = torch.where(pair == row // 128, own.amax(-1, keepdim=True), log)
            scores.append(x)
            scales.append(scale)
            largest.append(most)
            scaled.append(torch.where(most == -(2.0**30), -math.inf, most.float() * scale))
            logs.append(log.expand(*state, 1))
            visible.append(seen)
        second = (scaled[1] - scaled[0]) + (logs[1] - logs[0]) > 0
        score = torch.where(second, scaled[1], scaled[0])
        log = torch.where(second, logs[1], logs[0])
        rise = (score - top) + (log - top_offset)
        top = torch.where(rise > 0, score, top)
        top_offset = torch.where(rise > 0, log, top_offset)
        far = rise < -DROP
        score = torch.where(far, top, score)
        log = torch.where(far, top_offset - DROP, log)
        weight = torch.exp2((coordinate - score) + (offset - log))
        total = torch.zeros(*state, 1)
        product = torch.zeros(*state, head_dim, dtype=torch.float64)
        for half, tile in enumerate((2 * pair, 2 * pair + 1)):
            at = slice(64 * tile, 64 * tile + 64)
            scale, start = scales[half], (scaled[half] - score) - log
            if not fp8 and not per_key:
                start = start + (logs[half] + LOG2_254)
            x, most = scores[half] + MAGIC, largest[half] + MAGIC
            steep = q_scale.amax() * k_scale.amax() > MAX_STEP
            start = torch.where(steep, start, fma(-most.float(), scale, start))
            exponent = fma(torch.where(steep, x - most, x), scale, start)
            p = torch.where(visible[half], torch.exp2(exponent), 0.0)
            if fp8:
                codes = p.clamp(max=448).to(torch.float8_e4m3fn).double()
            else:
                factor = torch.full((), sign)
                if per_key:
                    factor = functional.pad(of_head["multiplier"], (0, padding))[..., None, at]
                    factor = factor * (sign * (254 / 255))
                biased = fma(p, factor, torch.tensor(MAGIC - 127 * sign))
                codes = (biased.contiguous().view(torch.int32) << 24 >> 24).double()
            if fp8 or per_key:
                total += p.sum(-1, keepdim=True)
            else:
                unit = torch.exp2(-LOG2_254 - logs[half])
                total += (codes * sign + 127).sum(-1, keepdim=True).float() * unit
            product += codes @ value[:, :, at]
        before = (output, bias, denominator, coordinate, offset)
        if not fp8:
            biased = product.to(torch.int32) + of_head["sums"][:, :, pair, None]
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
    vector = s["value_vector"]
    if vector is not None:
        vector = vector.repeat_interleave(groups, 1)[:, :, None]
    output = output * vector if fp8 else output / 254 + (0.0 if vector is None else vector)
    return output[:, :, :queries]
