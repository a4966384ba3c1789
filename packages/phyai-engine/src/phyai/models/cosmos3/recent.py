"""What was made last, kept for the next time it is asked for."""

from collections import OrderedDict
from collections.abc import Callable, Hashable


class Recent[K: Hashable, V]:
    """Keeps the values of the keys that were used last.

    Args:
        most: number of values to keep.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Returns the value of ``key``, which is made if it is not kept."""
        if key not in self._kept:
            self._kept[key] = make()
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]
