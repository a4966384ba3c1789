"""Sparse Piper attention in loops and float64, written from the maths and sharing no code."""

import math

import torch

WORDS = (0xF62B39F3, 0x802576E6, 0x910D4CFD, 0x4F877B5A)


def hadamard(size):
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return matrix


def rotate(x):
    size = x.shape[-1]
    bits = [(WORDS[i // 32] >> (i % 32)) & 1 for i in range(size)]
    signs = torch.tensor([1.0 if bit else -1.0 for bit in bits], dtype=torch.float64)
    return (x * signs) @ hadamard(size) / math.sqrt(size)


def codes_of(group):
    scale = group.abs().max() / 127 + 1e-7
    return (group / scale).round().clamp(-127, 127), scale


def existing(rows, lengths):
    if lengths is None:
        return [range(64 * b, min(64 * b + 64, rows)) for b in range(-(-rows // 64))]
    return [range(64 * b, 64 * b + n) for b, n in enumerate(lengths.tolist())]


def budget(ratios, blocks):
    units = [round(ratio * 10**6) for ratio in ratios]
    keep = [max(1, blocks * unit // 10**6) for unit in units]
    target = (sum(blocks * unit for unit in units) + 500_000) // 10**6
    target = min(max(target, sum(keep)), len(keep) * blocks)
    fractions = [(-(blocks * unit % 10**6), head) for head, unit in enumerate(units)]
    for _, head in sorted(fractions):
        if sum(keep) < target and keep[head] < blocks:
            keep[head] += 1
    return keep


def routes(query, key, ratios, blocks, routing, lengths):
    """Return the kept key blocks by (sequence, head, query block)."""
    rows, heads, kv_heads = query.shape[1], query.shape[2], key.shape[2]
    spans, keep, found = existing(rows, lengths), budget(ratios, blocks), {}
    for b in range(query.shape[0]):
        for h in range(heads):
            q, k = query[b, :, h].float(), key[b, :, h // (heads // kv_heads)].float()
            for i, span in enumerate(spans):
                scores = []
                for other in spans[:blocks]:
                    q_rows, k_rows = q[span.start : span.stop], k[other.start : other.stop]
                    if routing == "mean":
                        scores.append(float(q_rows.mean(0) @ k_rows.mean(0)))
                        continue
                    summary = q_rows.amax(0) + q_rows.amin(0)
                    scores.append(float(max(summary @ k_rows.amax(0), summary @ k_rows.amin(0))))
                order = sorted(range(blocks), key=lambda j: (-scores[j], j))
                found[b, h, i] = sorted(order[: keep[h]])
    return found


def attention(query, key, value, ratios, blocks, *, routing="minmax", lengths=None, routed=None):
    """Return float64 ``[B, S, H, D]``; rows that do not exist stay NaN."""
    rows, heads, features = query.shape[1:]
    groups, spans = heads // key.shape[2], existing(rows, lengths)
    rows_of = [list(span) for span in spans]
    every = torch.tensor([row for span in rows_of for row in span])
    kept = routes(query, key, ratios, blocks, routing, lengths)
    output = torch.full(query.shape, torch.nan, dtype=torch.float64)
    for b in range(query.shape[0]):
        for h in range(heads):
            q, k, v = (x[b, :, n].double() for x, n in
                       ((query, h), (key, h // groups), (value, h // groups)))  # fmt: skip
            mean = v[every].mean(0)
            k, v = rotate(k - k[every].mean(0)), v - mean
            key_tiles = [codes_of(k[row]) for row in rows_of]
            value_tiles = [codes_of(v[row]) for row in rows_of]
            for i, span in enumerate(spans):
                tiles = list(range(len(spans)))
                if routed is None or i < routed:
                    tiles = kept[b, h, i] + tiles[blocks:]
                for half in (0, 32):
                    group = [row for row in span if half <= row % 64 < half + 32]
                    if group:
                        q_codes, q_scale = codes_of(rotate(q[group]))
                        scale = q_scale * features**-0.5
                        result = _recurrence(q_codes, scale, tiles, key_tiles, value_tiles)
                        output[b, group, h] = result + mean
    return output


def _recurrence(q_codes, q_scale, tiles, key_tiles, value_tiles):
    total, weight = 0.0, 0.0
    best = torch.full((len(q_codes), 1), -torch.inf, dtype=torch.float64)
    for start in range(0, len(tiles), 2):
        pair = tiles[start : start + 2]
        scores = [(q_codes @ key_tiles[t][0].T) * q_scale * key_tiles[t][1] for t in pair]
        shifted = [s + value_tiles[t][1].log() for s, t in zip(scores, pair, strict=True)]
        here = torch.cat(shifted, 1).amax(1, keepdim=True)
        new = torch.maximum(best, here)
        total, weight = total * (best - new).exp(), weight * (best - new).exp()
        for s, t in zip(scores, pair, strict=True):
            p = (s - here).exp()
            codes = (p * value_tiles[t][1] * 255).round().clamp(0, 255)
            total = total + (codes @ value_tiles[t][0]) * (here - new).exp()
            weight = weight + p.sum(1, keepdim=True) * (here - new).exp()
        best = new
    return total / (weight * 255)
