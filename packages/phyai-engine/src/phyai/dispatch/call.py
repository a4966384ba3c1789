"""Call sites: where a layer asks for its kernel, and how repeated asking is made cheap."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from phyai.dispatch import bootstrap
from phyai.dispatch.config import ENV_VERIFY_FROZEN, env_flag
from phyai.dispatch.errors import FrozenChoiceError
from phyai.dispatch.facts import MISSING
from phyai.dispatch.names import listing
from phyai.dispatch.selection import Selection
from phyai.dispatch.selector import Selector
from phyai.dispatch.trace import SelectionTrace
from phyai.dispatch.types import KernelMode, KernelQuery, Profile, QuantFacts

_MODE: ContextVar[KernelMode] = ContextVar("phyai_kernel_mode", default=KernelMode.EAGER)
_NOTHING: Mapping[str, Any] = {}
_MEMO_LIMIT = 4096
_SITES: "weakref.WeakSet[CallSite]" = weakref.WeakSet()


class _Verify:
    frozen: bool | None = None


def current_mode() -> KernelMode:
    """Returns the execution mode in force in this context."""
    return _MODE.get()


@contextmanager
def kernel_mode_scope(mode: KernelMode | str) -> Iterator[None]:
    """Sets the execution mode in this context, for example around CUDA-graph capture."""
    token = _MODE.set(KernelMode.normalize(mode))
    try:
        yield
    finally:
        _MODE.reset(token)


def reset_verify_frozen() -> None:
    """Makes the next frozen call read ``PHYAI_KERNEL_VERIFY_FROZEN`` again."""
    _Verify.frozen = None


def _verify_frozen() -> bool:
    if _Verify.frozen is None:
        _Verify.frozen = env_flag(ENV_VERIFY_FROZEN)
    return _Verify.frozen


class CallSite:
    """One place in a model that calls one operation.

    A site remembers its choices under the facts that some row or rule reads, so a repeated call
    costs a dictionary look-up. `freeze` drops even that. Choices are forgotten, and a frozen site
    thaws, when the selector, its policy, device, model or catalog changes.

    Args:
        op: operation name.
        role: what the site is in its model; rules match it.
        prefer: row ids to try first where no rule matches.
        dims: dims that never change.
        attrs: attributes that never change.
    """

    def __init__(
        self,
        op: str,
        role: str = "",
        prefer: tuple[str, ...] = (),
        dims: Mapping[str, Any] | None = None,
        attrs: Mapping[str, Any] | None = None,
    ) -> None:
        self.op = op
        self.role = role
        self.prefer = tuple(prefer)
        self.dims = dict(dims or {})
        self.attrs = dict(attrs or {})
        self._memo: dict[Any, Selection] = {}
        self._frozen: dict[KernelMode, tuple[Any, Selection]] | None = None
        self._last: Selection | None = None
        self._selector: Selector | None = None
        self._epoch = self._revision = -1
        self._quant: Any = None
        self._quant_key: Any = None
        self._dims_read: tuple[tuple[str, ...], tuple[Any, ...]] = ((), ())
        self._dtypes_read = self._attrs_read = self._dims_read
        self._whole_shape = False
        _SITES.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return CallSite, (self.op, self.role, self.prefer, self.dims, self.attrs)

    def __repr__(self) -> str:
        return f"CallSite({self.op!r}, role={self.role!r})"

    def select(
        self,
        *,
        device: Any = None,
        dtype: Mapping[str, Any] = _NOTHING,
        quant: Any = None,
        dims: Mapping[str, Any] = _NOTHING,
        attrs: Mapping[str, Any] = _NOTHING,
        mode: KernelMode | str | None = None,
    ) -> Selection:
        """Returns the prepared row for this call.

        Args:
            device: device of the inputs; None is the selector's device.
            dtype: mapping of dtype role to dtype.
            quant: physical signature of the weight, or None.
            dims: dims of this call; they win over the site's.
            attrs: attributes of this call; they win over the site's.
            mode: execution mode; None is the mode in force.

        Raises:
            NoKernelError: if no row is usable.
            PolicyError: if policy rules conflict or pass bad params.
            FrozenChoiceError: if the frozen choice is verified and would differ.
        """
        mode = _MODE.get() if mode is None else KernelMode.normalize(mode)
        selector = bootstrap.get_kernel_selector()
        if (
            selector is not self._selector
            or selector.epoch != self._epoch
            or selector.catalog.revision != self._revision
        ):
            self._attach(selector)
        if self._frozen is not None:
            pinned = self._frozen.get(mode)
            if pinned is not None and pinned[0] == device:
                if _verify_frozen():
                    self._check_frozen(pinned[1], device, dtype, quant, dims, attrs, mode)
                self._last = pinned[1]
                return pinned[1]
        return self._keyed(selector, device, dtype, quant, dims, attrs, mode)

    def _keyed(
        self,
        selector: Selector,
        device: Any,
        dtype: Mapping[str, Any],
        quant: Any,
        dims: Mapping[str, Any],
        attrs: Mapping[str, Any],
        mode: KernelMode,
    ) -> Selection:
        if quant is not self._quant or type(quant) is dict:
            self._quant, self._quant_key = quant, QuantFacts.build(quant)
        key = (
            mode,
            device,
            self._quant_key,
            *map(dtype.get, *self._dtypes_read),
            *map(dims.get, *self._dims_read),
            *map(attrs.get, *self._attrs_read),
        )
        if self._whole_shape:
            key = (*key, *sorted(dims.items()))
        try:
            hit = self._memo.get(key)
        except TypeError:
            key, hit = None, None
        if hit is None:
            query = self._query(device, dtype, quant, dims, attrs, mode)
            hit = selector.select(query, self.prefer)
            if key is not None:
                if len(self._memo) >= _MEMO_LIMIT:
                    self._memo.clear()
                self._memo[key] = hit
        self._last = hit
        return hit

    def _query(
        self,
        device: Any,
        dtype: Mapping[str, Any],
        quant: Any,
        dims: Mapping[str, Any],
        attrs: Mapping[str, Any],
        mode: KernelMode,
    ) -> KernelQuery:
        return KernelQuery.build(
            self.op,
            role=self.role,
            device=device,
            dtype=dtype,
            quant=quant,
            shape={**self.dims, **dims},
            attrs={**self.attrs, **attrs},
            mode=mode,
        )

    def _attach(self, selector: Selector) -> None:
        """Forgets everything and reads from the selector which facts its choices depend on."""
        self._memo = {}
        self._frozen = None
        paths = selector.catalog.entry(self.op).paths | selector.policy.paths()

        def read(prefix: str) -> tuple[tuple[str, ...], tuple[Any, ...]]:
            names = sorted(path[len(prefix) :] for path in paths if path.startswith(prefix))
            return tuple(names), (MISSING,) * len(names)

        self._dims_read, self._dtypes_read = read("shape."), read("dtype.")
        self._attrs_read = read("attrs.")
        self._whole_shape = selector.policy.profile is Profile.AUTOTUNE
        self._selector, self._epoch = selector, selector.epoch
        self._revision = selector.catalog.revision

    def _check_frozen(self, pinned: Selection, *facts: Any) -> None:
        if self._selector is None:
            return
        fresh = self._keyed(self._selector, *facts)
        if not fresh.same_choice(pinned):
            raise FrozenChoiceError(
                f"{self!r} is frozen to {pinned.kernel_id!r}, but the facts of this call choose "
                f"{fresh.kernel_id!r}; unfreeze it, or warm up with every workload first"
            )

    def freeze(self) -> None:
        """Pins, per mode, the single choice seen so far. Other modes stay keyed.

        Raises:
            FrozenChoiceError: if the site was never used, or saw different choices in one mode.
        """
        selector = bootstrap.get_kernel_selector()
        if selector is not self._selector or selector.epoch != self._epoch:
            self._attach(selector)
        if not self._memo:
            raise FrozenChoiceError(f"{self!r} has no choice yet; run it once before freezing")
        frozen: dict[KernelMode, tuple[Any, Selection]] = {}
        for key, selection in self._memo.items():
            mode, device = key[0], key[1]
            seen = frozen.setdefault(mode, (device, selection))
            if not seen[1].same_choice(selection) or seen[0] != device:
                ids = listing({seen[1].kernel_id, selection.kernel_id})
                raise FrozenChoiceError(
                    f"{self!r} saw several choices in mode {mode}: {ids}; it cannot be frozen"
                )
        self._frozen = frozen

    def unfreeze(self) -> None:
        """Returns to keyed choices."""
        self._frozen = None

    @property
    def frozen(self) -> bool:
        """Whether choices are pinned."""
        return self._frozen is not None

    @property
    def cold(self) -> bool:
        """Whether nothing was chosen since the last change of the selector."""
        return not self._memo

    def trace(self) -> SelectionTrace | None:
        """Returns why the last call got its row; None if the site was never used."""
        return None if self._last is None else self._last.trace


def live_call_sites() -> list[CallSite]:
    """Returns the call sites that are alive, ordered by operation and role."""
    return sorted(_SITES, key=lambda site: (site.op, site.role))
