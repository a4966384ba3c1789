"""Call sites: where a layer asks for its kernel, and how repeated asking is made cheap."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from phyai.dispatch import bootstrap
from phyai.dispatch.choices import SiteChoices
from phyai.dispatch.config import ENV_VERIFY_FROZEN, env_flag
from phyai.dispatch.errors import FrozenChoiceError
from phyai.dispatch.names import listing
from phyai.dispatch.selection import Selection
from phyai.dispatch.trace import SelectionTrace
from phyai.dispatch.types import KernelMode, KernelQuery, QuantFacts

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
    costs a dictionary look-up, and a call equal to the last one a comparison. `freeze` drops even
    that. Choices are forgotten, and a frozen site thaws, when the selector, its policy, device,
    model or catalog changes. Several threads may use one site.

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
        self.prefer: tuple[str, ...] = tuple(prefer)
        self.dims: dict[str, Any] = dict(dims or {})
        self.attrs: dict[str, Any] = dict(attrs or {})
        self._choices: SiteChoices | None = None
        self._last: Selection | None = None
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
        choices = self._current()
        frozen = choices.frozen
        if frozen is not None:
            pinned = frozen.get(mode)
            if pinned is not None and pinned[0] == device:
                if _verify_frozen():
                    self._check_frozen(choices, pinned[1], device, dtype, quant, dims, attrs, mode)
                self._last = pinned[1]
                return pinned[1]
        recent = choices.recent
        if (
            mode is recent[0]
            and not attrs
            and quant is recent[1]
            and device == recent[2]
            and dims == recent[3]
            and dtype == recent[4]
        ):
            self._last = recent[5]
            return recent[5]
        selection = self._keyed(choices, device, dtype, quant, dims, attrs, mode)
        self._last = selection
        return selection

    def _current(self) -> SiteChoices:
        """Returns the choices of this generation of the selector in force."""
        selector = bootstrap.get_kernel_selector()
        choices = self._choices
        if (
            choices is None
            or choices.selector is not selector
            or choices.epoch != selector.epoch
            or choices.revision != selector.catalog.revision
        ):
            choices = self._choices = SiteChoices(selector, self.op)
        return choices

    def _keyed(
        self,
        choices: SiteChoices,
        device: Any,
        dtype: Mapping[str, Any],
        quant: Any,
        dims: Mapping[str, Any],
        attrs: Mapping[str, Any],
        mode: KernelMode,
    ) -> Selection:
        known, weight_format = choices.quant
        mutable = type(quant) is dict
        if quant is not known or mutable:
            weight_format = choices.formats.setdefault(QuantFacts.build(quant), object())
            choices.quant = (quant, weight_format)
        key: Any = (mode, device, weight_format)
        if choices.dtypes_read:
            key += tuple(map(dtype.get, *choices.dtypes_read))
        if choices.dims_read:
            key += tuple(map(dims.get, *choices.dims_read))
        if choices.attrs_read:
            key += tuple(map(attrs.get, *choices.attrs_read))
        if choices.whole_shape:
            key += tuple(sorted(dims.items()))
        try:
            hit = choices.memo.get(key)
        except TypeError:
            key, hit = None, None
        if hit is None:
            query = self._query(device, dtype, quant, dims, attrs, mode)
            hit = choices.selector.select(query, self.prefer)
            if key is not None:
                if len(choices.memo) >= _MEMO_LIMIT:
                    choices.memo.clear()
                choices.memo[key] = hit
        if key is not None and not attrs and not mutable:
            choices.recent = (mode, quant, device, dict(dims), dict(dtype), hit)
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

    def _check_frozen(self, choices: SiteChoices, pinned: Selection, *facts: Any) -> None:
        fresh = self._keyed(choices, *facts)
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
        choices = self._current()
        memo = list(choices.memo.items())
        if not memo:
            raise FrozenChoiceError(f"{self!r} has no choice yet; run it once before freezing")
        frozen: dict[KernelMode, tuple[Any, Selection]] = {}
        for key, selection in memo:
            mode, device = key[0], key[1]
            seen = frozen.setdefault(mode, (device, selection))
            if not seen[1].same_choice(selection) or seen[0] != device:
                ids = listing({seen[1].kernel_id, selection.kernel_id})
                raise FrozenChoiceError(
                    f"{self!r} saw several choices in mode {mode}: {ids}; it cannot be frozen"
                )
        choices.frozen = frozen

    def unfreeze(self) -> None:
        """Returns to keyed choices."""
        if self._choices is not None:
            self._choices.frozen = None

    @property
    def frozen(self) -> bool:
        """Whether choices are pinned."""
        return self._choices is not None and self._choices.frozen is not None

    @property
    def cold(self) -> bool:
        """Whether nothing was chosen since the last change of the selector."""
        return self._choices is None or not self._choices.memo

    def trace(self) -> SelectionTrace | None:
        """Returns why the last call got its row; None if the site was never used."""
        return None if self._last is None else self._last.trace

    def traces(self) -> list[SelectionTrace]:
        """Returns why each different choice was made since the selector last changed, in order."""
        if self._choices is None:
            return []
        return [selection.trace for selection in list(self._choices.memo.values())]


def live_call_sites() -> list[CallSite]:
    """Returns the call sites that are alive, ordered by operation and role."""
    return sorted(_SITES, key=lambda site: (site.op, site.role))
