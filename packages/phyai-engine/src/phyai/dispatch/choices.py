"""The memory of one call site under one generation of its selector."""

from typing import Any

from phyai.dispatch.facts import MISSING
from phyai.dispatch.selection import Selection
from phyai.dispatch.selector import Selector
from phyai.dispatch.types import KernelMode, Profile, QuantFacts


class SiteChoices:
    """What a site knows under one generation of the selector.

    A call that started before a change ends in the generation it started in, so that no late
    answer of an old policy reaches the new one.
    """

    __slots__ = (
        "attrs_read",
        "dims_read",
        "dtypes_read",
        "epoch",
        "formats",
        "frozen",
        "memo",
        "quant",
        "recent",
        "revision",
        "selector",
        "whole_shape",
    )

    def __init__(self, selector: Selector, op: str) -> None:
        # Generation first: a change during the reading below makes it a stale one.
        self.selector: Selector = selector
        self.epoch: int = selector.epoch
        self.revision: int = selector.catalog.revision
        policy = selector.policy
        paths = selector.catalog.entry(op).paths | policy.paths()

        def read(prefix: str) -> tuple[tuple[Any, ...], ...]:
            names = sorted(path[len(prefix) :] for path in paths if path.startswith(prefix))
            return (tuple(names), (MISSING,) * len(names)) if names else ()

        self.dims_read: tuple[tuple[Any, ...], ...] = read("shape.")
        self.dtypes_read: tuple[tuple[Any, ...], ...] = read("dtype.")
        self.attrs_read: tuple[tuple[Any, ...], ...] = read("attrs.")
        self.whole_shape: bool = policy.profile is Profile.AUTOTUNE
        self.memo: dict[Any, Selection] = {}
        self.frozen: dict[KernelMode, tuple[Any, Selection]] | None = None
        # One object per weight format stands for it in keys: it hashes faster than its facts.
        self.formats: dict[QuantFacts, object] = {QuantFacts(): object()}
        self.quant: tuple[Any, object] = (None, self.formats[QuantFacts()])
        # Arguments of the last call and its choice; copies, since callers may reuse their dicts.
        self.recent: tuple[Any, ...] = (None,) * 6
