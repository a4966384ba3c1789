"""What a model of attention between projections stands for, without the codes of attention."""

import torch

from piper_kernels.attention.coarse import reference as coarse_reference
from piper_kernels.attention.sparse_piper_attention._routing import routing_mode


def exact(model, args=None):
    """Return the result in FP32 and float64, for models in which every key block is kept.

    Projections have the codes of their inputs and weights, which are those of the format, and
    are not rounded behind them.
    """
    assert model.dense or set(model.ratios) == {1.0}, "routes depend on the last bits of queries"
    x, cos, sin, gate, lengths = model.args if args is None else args
    kept = model.weights
    model.weights = {name: weight.to(torch.float32) for name, weight in kept.items()}
    try:
        with torch.no_grad():
            return _exact(model, x.float(), cos, sin, gate.float(), lengths)
    finally:
        model.weights = kept


def _exact(model, x, cos, sin, gate, lengths):
    rows, width = x.shape[1], model.head_dim
    operands = model.operands(x, cos, sin)
    assert all(part.dtype == torch.float32 for part in operands)
    query, key, value = (
        part.double() if model.dense else part.double().transpose(1, 2) for part in operands
    )
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
    scores = query @ key.mT * width**-0.5
    if model.is_causal:
        later = torch.ones(rows, rows, dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    if lengths is not None:
        inside = torch.arange(64, device=x.device) < lengths[:, None]
        scores = scores.masked_fill(~inside.flatten(), -torch.inf)
    attended = (scores.softmax(-1) @ value).transpose(1, 2)
    if model.coarse:
        if model.projected_gate:
            gate = model.linear("gate", x).unflatten(-1, (-1, width))
        blocks = -(-rows // 64) if model.coarse_key_blocks is None else model.coarse_key_blocks
        attended = attended + coarse_reference.coarse_residual(
            *operands, gate, blocks, 0.125, routing_mode(model.routing), lengths
        )
    merged = attended.flatten(2)
    return merged if model.outputs is None else model.linear("out", merged.float())
