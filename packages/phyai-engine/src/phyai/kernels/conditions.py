"""Conditions that rows of several operations share."""

from typing import Any

from phyai.dispatch.conditions import eq, lib, one_of
from phyai.dispatch.predicate import Predicate, all_of

HALF = ("bf16", "fp16")

NVIDIA: Predicate = eq("device.vendor", "nvidia")
"""An NVIDIA GPU."""

FLASHINFER: Predicate = all_of(NVIDIA, lib("flashinfer"))
"""An NVIDIA GPU and a usable FlashInfer. The vendor comes first, so nothing is probed on a CPU."""

HEAD_DIMS = (64, 128, 256)
"""Head widths that FlashInfer has attention and rotary kernels for."""

VECTOR = 8
"""Half-precision values of one 16-byte access; FlashInfer's row kernels need whole ones."""


def half(*roles: str) -> Predicate:
    """The named dtype roles are bf16 or fp16."""
    return all_of(*(one_of(f"dtype.{role}", *HALF) for role in roles))


def returns(function: Any) -> Any:
    """Makes a ``prepare`` that hands out one function, whatever the facts."""

    def prepare(facts: Any, params: Any) -> Any:  # noqa: ARG001
        return function

    return prepare
