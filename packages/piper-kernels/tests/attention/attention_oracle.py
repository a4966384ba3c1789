"""Attention in FP64, and the quantized recurrences written as loops over single numbers."""

import math

import torch


def random_operands(batch, heads, kv_heads, queries, keys, head_dim, dtype=torch.float16, seed=0):
    """Return N(0, 1) queries, keys and values."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    return tuple(
        torch.randn(batch, h, s, head_dim, generator=generator).to(dtype) for h, s in shapes
    )


def exact_attention(query, key, value, *, scale=None, is_causal=False):
    """Return attention in FP64."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(groups, 1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query.double() @ key.mT * scale
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores.softmax(-1) @ value


def sqnr(output, exact):
    """Return the signal to quantization noise ratio in dB."""
    error = output.double() - exact
    return 10 * math.log10(exact.pow(2).sum() / error.pow(2).sum())


def hadamard_matrix(size):
    """Return the Sylvester matrix, built by doubling."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


SIGN_BITS = "f62b39f3802576e6910d4cfd4f877b5a"


def rotated(x):
    """Rotate FP64 rows ``[S, D]`` by the signed matrix."""
    words = [int(SIGN_BITS[i : i + 8], 16) for i in range(0, 32, 8)]
    size = x.shape[-1]
    signs = [1 if words[i // 32] >> (i % 32) & 1 else -1 for i in range(size)]
    return x * torch.tensor(signs, dtype=torch.float64) @ hadamard_matrix(size) / math.sqrt(size)


def row_group(kind, row, granularity):
    """Return what rows of one scale have in common."""
    block = 32 if kind == "query" else 64
    if granularity == "PER_WARP":
        return row // block
    within = row % 8 if kind == "query" else (row % 8) // 2
    return row // block, within


def grouped_codes(x, kind, granularity):
    """Quantize FP64 rows ``[S, D]`` one group after the other."""
    codes, scales = torch.zeros_like(x), torch.zeros(len(x), dtype=torch.float64)
    members = {}
    for row in range(len(x)):
        members.setdefault(row_group(kind, row, granularity), []).append(row)
    for rows in members.values():
        scale = x[rows].abs().max() / 127 + 1e-7
        codes[rows] = (x[rows] / scale).round().clamp(-127, 127)
        scales[rows] = scale
    return codes, scales


def piper_loop(query, key, value, *, is_causal, granularity="PER_THREAD"):
    """Return dense Piper attention of one head, ``[S, D]`` each, row by row in FP64."""
    query, key, value = query.double(), key.double(), value.double()
    scale = query.shape[-1] ** -0.5
    mean = torch.zeros(value.shape[-1]) if is_causal else value.mean(0)
    value = value - mean
    qc, qs = grouped_codes(rotated(query), "query", granularity)
    kc, ks = grouped_codes(rotated(key - key.mean(0)), "key", granularity)
    vs = value.abs().amax(1) / 127 + 1e-7
    vc = (value / vs[:, None]).round().clamp(-127, 127)
    output = []
    for i in range(len(query)):
        numerator, denominator, running = torch.zeros(value.shape[-1]).double(), 0.0, -math.inf
        for start in range(0, len(key), 64):
            visible = [
                j for j in range(start, min(start + 64, len(key))) if not is_causal or j <= i
            ]
            if not visible:
                continue
            scores = {j: float(qc[i] @ kc[j]) * float(qs[i] * ks[j]) * scale for j in visible}
            tile = max(scores[j] + math.log(vs[j]) for j in visible)
            new = max(running, tile)
            old_weight = 0.0 if running == -math.inf else math.exp(running - new)
            weight = math.exp(tile - new)
            partial, total = torch.zeros_like(numerator), 0.0
            for j in visible:
                p = math.exp(scores[j] - tile)
                total += p
                partial += min(max(round(p * float(vs[j]) * 255), 0), 255) * vc[j]
            denominator = denominator * old_weight + total * weight
            numerator = numerator * old_weight + partial * weight
            running = new
        output.append(numerator / (max(denominator, 1e-30) * 255) + mean)
    return torch.stack(output)


def sage_loop(query, key, value, *, is_causal, granularity="PER_THREAD"):
    """Return SageAttention2++ of one head, ``[S, D]`` each, row by row in FP64."""
    query, key, value = query.double(), key.double(), value.double()
    scale = query.shape[-1] ** -0.5
    qc, qs = grouped_codes(rotated(query), "query", granularity)
    kc, ks = grouped_codes(rotated(key - key.mean(0)), "key", granularity)
    vs = value.abs().amax(0) / 2.25 + 1e-7
    v8 = (value / vs).float().to(torch.float8_e4m3fn).double()
    output = []
    for i in range(len(query)):
        accumulated, denominator, running = torch.zeros_like(vs), 0.0, -math.inf
        last = i + 1 if is_causal else len(key)
        for start in range(0, last, 64):
            tile = slice(start, min(start + 64, last))
            scores = (kc[tile] @ qc[i]) * qs[i] * ks[tile] * scale
            new = max(running, float(scores.max()) - math.log(448))
            weight = 0.0 if running == -math.inf else math.exp(running - new)
            p = (scores - new).exp()
            p8 = p.float().to(torch.float8_e4m3fn).double()
            denominator = denominator * weight + float(p.sum())
            accumulated = accumulated * weight + (p8 @ v8[tile]).half().double() * vs
            running = new
        output.append(accumulated / denominator)
    return torch.stack(output)
