"""Which cache slots each request sees, as two runs whose lengths lie on the device."""

from dataclasses import dataclass

from torch import Tensor

FIELDS = 6


@dataclass(frozen=True, eq=False)
class SegmentPlan:
    """Query rows and visible cache slots of each request.

    Group ``g`` owns the query rows ``table[g, 0]`` to ``table[g, 0] + table[g, 1]`` and sees the
    slots of two runs: ``table[g, 3]`` from ``table[g, 2]`` on and ``table[g, 5]`` from
    ``table[g, 4]`` on. A run may be empty, both may not. The numbers are read when a kernel runs,
    so a recorded graph serves requests of other lengths when they are written anew.

    Attributes:
        table: int32 [groups, 6] on the device.
        most_rows: no group has more query rows.
        most_keys: no group sees more slots.
    """

    table: Tensor
    most_rows: int
    most_keys: int


def segment_row(queries: tuple[int, int], *runs: tuple[int, int]) -> list[int]:
    """Returns one row of a plan's table from ``(first, count)`` of its queries and key runs.

    Raises:
        ValueError: for more than two runs, a negative number, or no keys.
    """
    if len(runs) > 2:
        raise ValueError(f"{len(runs)} runs of keys; a group has one or two")
    numbers = [*queries, *(number for run in runs for number in run)]
    numbers += [0] * (FIELDS - len(numbers))
    if min(numbers) < 0:
        raise ValueError(f"a group has a negative number: {numbers}")
    if numbers[3] + numbers[5] == 0:
        raise ValueError(f"the group with query rows {queries} has no keys to attend to")
    return numbers
