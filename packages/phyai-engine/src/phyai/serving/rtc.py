"""Real-time chunking: how a new chunk joins the rest of the last one.

While the server computes, the robot goes on with the last chunk. The new chunk starts at the
moment of its observation, so its first ``delay`` actions are already decided. Up to ``horizon`` the
weight of the last chunk falls to zero; `phyai.guidance` has the formula. Where the
model can be guided the weights guide its flow, in the model's units; of other models the finished
chunks are blended, in the robot's units.
"""

import time
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from phyai.guidance import guidance_weights
from phyai.serving.continuation import Chunk, RTCOptions
from phyai.serving.jobs import RequestError


def blend(actions: np.ndarray, left: np.ndarray, options: RTCOptions) -> np.ndarray:
    """Join a new chunk to the rest of the last one.

    Args:
        actions: float32 [chunk, action_dim], the new chunk.
        left: float32 [T, action_dim], the rest of the last one; its first row and the first row of
            `actions` are for the same moment.
        options: Delay, horizon and schedule; `horizon` is cut to T.

    Returns:
        float32 [chunk, action_dim].

    Raises:
        RequestError: The widths differ.
    """
    if left.shape[1] != actions.shape[1]:
        raise RequestError(
            f"the rest of the last chunk has {left.shape[1]} columns, the new chunk "
            f"{actions.shape[1]}; send actions in the robot's units"
        )
    horizon = options.end(len(actions))
    shared = min(len(left), len(actions))
    weights = guidance_weights(shared, options.delay, horizon, options.schedule.value)
    kept = weights.numpy()[:, None]
    joined = actions.copy()
    joined[:shared] = kept * left[:shared] + (1.0 - kept) * actions[:shared]
    return joined


class Sessions:
    """The last chunk of every session; the oldest are forgotten.

    Args:
        limit: Sessions that are kept.
        max_age_s: Seconds after which a chunk is too old to be continued.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        limit: int = 1024,
        max_age_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit, self._max_age_s, self._clock = limit, max_age_s, clock
        self._chunks: OrderedDict[object, tuple[float, Chunk]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chunks)

    def put(self, session: object, chunk: Chunk) -> None:
        """Keep the last chunk of `session`."""
        self._chunks[session] = (self._clock(), chunk)
        self._chunks.move_to_end(session)
        while len(self._chunks) > self._limit:
            self._chunks.popitem(last=False)

    def left(self, session: object, executed: int) -> Chunk | None:
        """Return the last chunk of `session` after `executed` actions, None without any left."""
        found = self._chunks.get(session)
        if found is None or self._clock() - found[0] > self._max_age_s:
            return None
        rest = found[1].after(executed)
        return rest if len(rest.actions) else None

    def forget(self, session: object) -> None:
        """Drop what is kept of `session`."""
        self._chunks.pop(session, None)
