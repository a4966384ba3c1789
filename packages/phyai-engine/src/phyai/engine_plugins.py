"""What a model family gives the engine, and where the engine finds one by its name."""

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from phyai.layers import Linear

if TYPE_CHECKING:
    from phyai.engine import ActionChunk
    from phyai.processing.inputs import Observation

ENTRY_POINT_GROUP = "phyai.models"
_BUILT_IN = {
    "cosmos3": "phyai.models.cosmos3.main_cosmos3:Cosmos3Generator",
    "cosmos3_policy": "phyai.models.cosmos3.main_cosmos3:Cosmos3Policy",
    "pi05": "phyai.models.pi05.main_pi05:PI05Policy",
}


class ModelPlugin(Protocol):
    """What a model family gives the engine.

    A family whose chunks can be guided takes ``guidance`` in `infer` and has `normalize_actions`,
    as `Engine.normalize_actions` describes it. One with requests of its own has ``run``, see
    `Engine.run`, and may lack `infer`. One that several devices compute together takes
    ``parallel``, a `ParallelConfig`, when it is made, and is made in every process of the default
    process group. The attribute ``family`` is what kernel policies call it, if not by its name.

    One that records work once, such as CUDA graphs, may have a method ``warm_up(batches)``, which
    `Engine.warm_up` calls with the numbers of observations that will be answered at once.

    One that is served has a static method ``serving_args``, which makes its arguments of a
    `phyai.serving.PolicyConfig`, and describes ``image_resolution`` (height, width),
    ``chunk_size``, ``num_steps`` and, below ``processing``, ``preset``, ``cameras``,
    ``camera_aliases`` (request key to camera), ``state_dim`` and ``action_dim``.
    """

    def infer(
        self,
        observations: "Sequence[Observation]",
        *,
        noise: Tensor | None,
        seed: int | None,
        num_steps: int | None,
    ) -> "list[ActionChunk]":
        """Answers a batch of observations."""
        ...

    def call_sites(self) -> Sequence[Any]:
        """Returns the kernel call sites of the model, in module order."""
        ...

    def linear_layers(self) -> Sequence[Linear]:
        """Returns the layers whose weights have formats, in module order."""
        ...

    def weight_bytes(self) -> int:
        """Returns the bytes its weights occupy."""
        ...

    def describe(self) -> dict[str, Any]:
        """Returns shapes, dtypes, preset and formats for people and tools."""
        ...


def find_plugin(name: str) -> Callable[..., ModelPlugin]:
    """Returns what makes the plugin of a model family, built in or of an installed package.

    Raises:
        ValueError: for an unknown name.
    """
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        return getattr(import_module(module), attribute)
    found = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    if name in found:
        return found[name].load()
    known = ", ".join(sorted({*_BUILT_IN, *found}))
    raise ValueError(
        f"no model plugin {name!r}; known: {known}. "
        f"Packages add plugins through the entry-point group {ENTRY_POINT_GROUP}"
    )
