"""Prepared rows by id, and inputs with odd sizes and strides."""

import pytest
import torch

from phyai.dispatch.catalog import build_catalog
from phyai.dispatch.facts import Facts

CATALOG = build_catalog()


@pytest.fixture
def row():
    """Returns the callable of a row: ``row("torch.rmsnorm", **{"attrs.variant": "rms"})``."""

    def prepare(kernel_id, params=None, **facts):
        impl = CATALOG.impl(kernel_id)
        return impl.prepare(Facts({"op": impl.op, **facts}), params or {})

    return prepare


@pytest.fixture
def strided():
    """Returns normal values in a tensor whose rows are views of a NaN-filled buffer."""

    def make(*shape, dtype=torch.float32, seed=0, std=1.0):
        generator = torch.Generator().manual_seed(seed)
        values = (torch.randn(shape, generator=generator) * std).to(dtype)
        buffer = torch.full((*shape[:-1], 2 * shape[-1] + 3), torch.nan, dtype=dtype)
        view = buffer[..., 1 : 2 * shape[-1] + 1 : 2]
        view.copy_(values)
        return view

    return make


def _error(actual, expected):
    actual, expected = actual.double(), expected.double()
    norm = expected.norm()
    return float((actual - expected).norm() / norm) if norm else float(actual.norm())


@pytest.fixture
def relative_error():
    return _error
