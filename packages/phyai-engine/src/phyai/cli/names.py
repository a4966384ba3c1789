"""Long lists of layer names in few words."""

import re
from collections.abc import Iterable

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def compact_names(names: Iterable[str]) -> list[str]:
    """Return names that differ in one number as one: ``layers.[0-17].mlp``.

    Args:
        names: Dotted names, repetitions allowed.

    Returns:
        One entry for each pattern of the last number of a name, in the order of their first.
    """
    patterns: dict[tuple[str, str], set[int]] = {}
    for name in names:
        numbers = list(_NUMBER.finditer(name))
        if not numbers:
            patterns.setdefault((name, ""), set())
            continue
        last = numbers[-1]
        key = (name[: last.start()], name[last.end() :])
        patterns.setdefault(key, set()).add(int(last[0]))
    return [
        before + (_ranges(sorted(found)) if found else "") + after
        for (before, after), found in patterns.items()
    ]


def _ranges(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return f"[{','.join(words)}]"
