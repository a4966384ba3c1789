"""How far a result is from the exact one."""

import math

import torch
from torch import Tensor


def quality(actual: Tensor, exact: Tensor) -> dict:
    """Return the distance of a result, computed in FP64.

    Args:
        actual: Result of any floating dtype.
        exact: Exact values of the same shape.

    Returns:
        ``sqnr_db`` (signal over error power in dB, ``None`` for an exact result or a zero
        signal), ``cosine``, ``relative_l2`` and ``nonfinite``, the number of results that are
        not finite. With one of them the other fields are ``None``.
    """
    actual, exact = actual.double(), exact.double()
    nonfinite = int((~torch.isfinite(actual)).sum())
    if nonfinite:
        return {"sqnr_db": None, "cosine": None, "relative_l2": None, "nonfinite": nonfinite}
    error, signal = float((actual - exact).norm()), float(exact.norm())
    size = float(actual.norm()) * signal
    ratio = error / signal if signal else math.inf if error else 0.0
    return {
        "sqnr_db": -20 * math.log10(ratio) if 0 < ratio < math.inf else None,
        "cosine": float((actual * exact).sum()) / size if size else None,
        "relative_l2": ratio if ratio < math.inf else None,
        "nonfinite": 0,
    }
