"""FlashInfer's planned attention: one wrapper per plan, planned once and run by every layer.

Planning copies to the host and must happen before CUDA-graph capture; running is capturable. A
captured graph reads the wrapper's buffers, so whoever owns the graph must keep its plan alive.
"""

import weakref
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phyai.runtime.streams import lane

if TYPE_CHECKING:
    from phyai.runtime.paged import PagedPlan

_LEAST_BYTES = 128 * 2**20
_OTHER_BYTES = 16 * 2**20


def workspace_bytes(heads: int, kv_heads: int, head_dim: int, processors: int) -> int:
    """Returns a workspace size that FlashInfer's plans fit in.

    FA2 splits keys until two blocks per multiprocessor are busy, and keeps a partial result in fp32
    and its logarithm for every row of every block: 136 MiB for π0.5 on an H200.

    Args:
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: width of a head.
        processors: multiprocessors of the GPU.
    """
    rows = 64 if head_dim >= 256 else 128
    blocks = max(2 * processors // kv_heads, 1)
    partial = 4 * heads * blocks * rows * (head_dim + 1)
    return max(_LEAST_BYTES, partial + _OTHER_BYTES)


def _workspace_for(heads: int, kv_heads: int, head_dim: int, device: torch.device) -> int:
    processors = 0
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return workspace_bytes(heads, kv_heads, head_dim, processors)


def _workspace(size: int, device: torch.device) -> Tensor:
    # FlashInfer asks for a workspace that is zero at first use.
    return torch.zeros(size, dtype=torch.uint8, device=device)


def _host_index(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def _refuse_capture(what: str) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"flashinfer attention must plan this {what} before CUDA-graph capture; run the same "
            "call once eagerly, with the same plan object, and capture then"
        )


class PagedRunner:
    """Calls ``BatchPrefillWithPagedKVCacheWrapper`` with page layout NHD.

    Args:
        backend: FlashInfer's backend name, such as ``auto`` or ``fa2``.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self._planned: dict[int, dict[Any, Any]] = {}
        self._free: dict[tuple[int, torch.device], list[Any]] = {}

    def __call__(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: "PagedPlan", *, scale: float
    ) -> Tensor:
        """Runs the operation ``attention_paged``; see its signature."""
        key = (q.shape[1:], k_pages.shape[1:], q.dtype, k_pages.dtype, scale, q.device)
        planned = self._planned.get(id(plan))
        ready = planned.get(key) if planned is not None else None
        if ready is None:
            ready = self._plan(q, k_pages, plan, scale)
            self._planned[id(plan)][key] = ready
        return ready[1].run(q, (k_pages, v_pages))

    def _plan(
        self, q: Tensor, k_pages: Tensor, plan: "PagedPlan", scale: float
    ) -> tuple[tuple[int, torch.device], Any]:
        """Returns a planned wrapper behind the size and place of its workspace."""
        _refuse_capture("paged plan")
        if id(plan) not in self._planned:
            self._planned[id(plan)] = {}
            weakref.finalize(plan, self._release, id(plan))
        kind = (_workspace_for(q.shape[1], k_pages.shape[2], q.shape[2], q.device), q.device)
        free = self._free.setdefault(kind, [])
        wrapper = free.pop() if free else self._new_wrapper(*kind)
        page = plan.page_size
        pages = tuple(-(-keys // page) for keys in plan.kv_lens)
        last = [keys - (n - 1) * page for keys, n in zip(plan.kv_lens, pages, strict=True)]
        wrapper.plan(
            _host_index(plan.qo_lens),
            _host_index(pages),
            plan.kv_indices,
            torch.tensor(last, dtype=torch.int32),
            q.shape[1],
            k_pages.shape[2],
            q.shape[2],
            page,
            causal=False,
            sm_scale=scale,
            q_data_type=q.dtype,
            kv_data_type=k_pages.dtype,
        )
        return kind, wrapper

    def _new_wrapper(self, size: int, device: torch.device) -> Any:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        return BatchPrefillWithPagedKVCacheWrapper(
            _workspace(size, device), "NHD", backend=self.backend
        )

    def _release(self, plan_id: int) -> None:
        """Keeps the wrappers of a dead plan for the next one."""
        for kind, wrapper in self._planned.pop(plan_id, {}).values():
            self._free[kind].append(wrapper)


class RaggedRunner:
    """Calls ``BatchPrefillWithRaggedKVCacheWrapper`` on padded batches and on packed rows.

    The last wrappers are kept, one per shape and lane of `side_by_side`: kernels that run at once
    must not share a workspace. Those that ran inside a CUDA graph are kept for the life of the
    process, because graphs read their buffers.

    Args:
        backend: FlashInfer's backend name.
        kept: number of wrappers to keep.
    """

    def __init__(self, backend: str, kept: int = 16) -> None:
        self.backend = backend
        self.kept = kept
        self._planned: dict[Any, Any] = {}
        self._captured: dict[Any, Any] = {}

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        causal: bool = False,
        lens: tuple[int, ...] | None = None,
        kv_lens: tuple[int, ...] | None = None,
    ) -> Tensor:
        """Runs the operation ``attention``; see its signature."""
        shape = q.shape
        if lens is None:
            lens, kv_lens = (q.shape[1],) * q.shape[0], (k.shape[1],) * k.shape[0]
            q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        keys = lens if kv_lens is None else kv_lens
        facts = (lens, keys, q.shape, k.shape, q.dtype, k.dtype, scale, causal, q.device, lane())
        wrapper = self._captured.get(facts) or self._planned.get(facts)
        if wrapper is None:
            wrapper = self._plan(q, k, lens, keys, scale, causal)
            while len(self._planned) >= self.kept:
                del self._planned[next(iter(self._planned))]
            self._planned[facts] = wrapper
        elif torch.cuda.is_current_stream_capturing():
            self._captured[facts] = self._planned.pop(facts, wrapper)
        return wrapper.run(q, k, v).view(shape)

    def _plan(
        self,
        q: Tensor,
        k: Tensor,
        lens: tuple[int, ...],
        kv_lens: tuple[int, ...],
        scale: float,
        causal: bool,
    ) -> Any:
        from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

        _refuse_capture("shape")
        size = _workspace_for(q.shape[1], k.shape[1], q.shape[2], q.device)
        wrapper = BatchPrefillWithRaggedKVCacheWrapper(
            _workspace(size, q.device), "NHD", backend=self.backend
        )
        wrapper.plan(
            _host_index(lens).to(q.device),
            _host_index(kv_lens).to(q.device),
            q.shape[1],
            k.shape[1],
            q.shape[2],
            causal=causal,
            sm_scale=scale,
            q_data_type=q.dtype,
            kv_data_type=k.dtype,
        )
        return wrapper


@lru_cache(maxsize=16)
def paged_runner(backend: str) -> PagedRunner:
    """Returns the process's paged runner of a backend, shared by all layers."""
    import flashinfer  # noqa: F401  # pyright: ignore[reportUnusedImport]

    return PagedRunner(backend)


@lru_cache(maxsize=16)
def ragged_runner(backend: str) -> RaggedRunner:
    """Returns the process's ragged runner of a backend, shared by all layers."""
    import flashinfer  # noqa: F401  # pyright: ignore[reportUnusedImport]

    return RaggedRunner(backend)
