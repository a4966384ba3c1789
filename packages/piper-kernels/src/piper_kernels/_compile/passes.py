"""Inductor graph passes and the rule by which compile options install them."""

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from torch._guards import TracingContext
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

OPTION = "post_grad_custom_pre_pass"
_REVISION = "1"
_PACKAGE = Path(__file__).parent.parent
# Newer Inductor takes several passes and tells them whether the graph is for inference.
_RUNS_SEQUENCES = hasattr(custom_graph_pass, "get_custom_graph_passes")
_BASE: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", CustomGraphPass)

GraphPass = Callable[..., None]


class GraphRewritePass(_BASE):
    """A rewrite of inference graphs; training graphs are left alone.

    Two passes of one class are equal, so that copied options are not extended again.

    Attributes:
        sources: Folders and files, relative to the package, whose contents decide what the
            pass does. They identify it in Inductor's caches.
    """

    sources: Sequence[str] = ()

    @abstractmethod
    def rewrite(self, graph: Graph) -> bool:
        """Rewrite a functional graph in place; return whether anything changed."""

    def __call__(self, graph: Graph, is_inference: bool | None = None) -> None:
        if is_inference is None:
            is_inference = _traces_inference()
        if is_inference and self.rewrite(graph):
            graph.eliminate_dead_code()
            graph.lint()

    def uuid(self) -> bytes:
        """Return a hash of the implementation."""
        return _hash_sources(type(self).__qualname__, ("_compile", *self.sources))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


class PassSequence(tuple, CustomGraphPass):
    """Passes in order, as one pass for an Inductor that takes only one."""

    __slots__ = ()

    def __call__(self, graph: Graph) -> None:
        for graph_pass in self:
            graph_pass(graph)

    def uuid(self) -> tuple[Any, ...] | None:
        """Return the identities of the passes, or ``None`` if one of them has none."""
        identities = tuple(
            item.uuid() if isinstance(item, CustomGraphPass) else None for item in self
        )
        return None if None in identities else identities


def install_passes(
    options: Mapping[str, object] | None,
    base: GraphPass,
    fusion: GraphPass | None = None,
    *,
    fusion_first: bool = True,
) -> dict[str, object]:
    """Return a copy of compile options with the passes of a helper.

    Passes that are there already stay where they are. A missing base pass is appended, a
    missing fusion pass goes directly before or behind the base pass.

    Args:
        options: Options of ``torch.compile``, not modified.
        base: The pass over ordinary linears.
        fusion: A pass over larger parts of the graph.
        fusion_first: Whether it has to see the graph before the base pass, not what that makes.
    """
    passes = _existing(options, OPTION)
    if base not in passes:
        passes.append(base)
    if fusion is not None and fusion not in passes:
        passes.insert(passes.index(base) + (not fusion_first), fusion)
    return _with_passes(options, OPTION, passes)


def install_pass(
    options: Mapping[str, object] | None, option: str, added: GraphPass
) -> dict[str, object]:
    """Return a copy of compile options with one more pass at an option, unless it is there.

    Args:
        options: Options of ``torch.compile``, not modified.
        option: Where the pass runs, such as ``"pre_grad_custom_pass"``.
        added: The pass.
    """
    passes = _existing(options, option)
    if added not in passes:
        passes.append(added)
    return _with_passes(options, option, passes)


def _existing(options: Mapping[str, object] | None, option: str) -> list[Any]:
    existing: Any = (options or {}).get(option)
    if existing is None:
        return []
    return list(existing) if isinstance(existing, list | tuple) else [existing]


def _with_passes(
    options: Mapping[str, object] | None, option: str, passes: list[Any]
) -> dict[str, object]:
    result = dict(options or {})
    if len(passes) == 1 and not isinstance(result.get(option), list | tuple):
        result[option] = passes[0]
    else:
        result[option] = tuple(passes) if _RUNS_SEQUENCES else PassSequence(passes)
    return result


def _traces_inference() -> bool:
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    return metadata is not None and not getattr(metadata, "is_train", True)


@cache
def _hash_sources(name: str, sources: tuple[str, ...]) -> bytes:
    digest = hashlib.sha256(f"{_REVISION} {name}".encode())
    for source in sources:
        path = _PACKAGE / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(str(file.relative_to(_PACKAGE)).encode())
            digest.update(file.read_bytes())
    return digest.digest()
