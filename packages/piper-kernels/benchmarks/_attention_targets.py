"""What attention is meant to reach on an H200, and what a run found."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A bound on a number of a row, preparation and routing included.

    Attributes:
        text: What is required, in words.
        required: Least value.
        applies: Whether a row is meant.
        field: The number.
    """

    text: str
    required: float
    applies: Callable[[dict], bool]
    field: str = "times_cudnn"


def _dense(provider: str, head_dim: int, rows: int, causal: bool | None) -> Callable[[dict], bool]:
    return lambda row: (
        row["provider"] == provider
        and row["head_dim"] == head_dim
        and row["rows"] >= rows
        and row.get("keep") is None
        and (causal is None or row["causal"] is causal)
    )


def _sparse(row: dict) -> bool:
    wanted = row["provider"].startswith("sparse") and row.get("keep") == 0.2
    return wanted and (row["rows"], row["head_dim"]) == (32768, 128)


TARGETS = (
    Target("Piper over cuDNN, D128, full", 1.25, _dense("piper", 128, 8192, False)),
    Target("Piper over cuDNN, D128, causal", 1.15, _dense("piper", 128, 8192, True)),
    Target("Piper over cuDNN, D64", 1.2, _dense("piper", 64, 8192, None)),
    Target("Piper, TOP/s, D128, full", 800, _dense("piper", 128, 16384, False), "tops"),
    Target("SageAttention2++ over cuDNN, D128", 1.35, _dense("sage", 128, 16384, None)),
    Target("Sparse Piper over dense cuDNN, keep 0.2", 2.5, _sparse),
)


def _alone(row: dict, field: str) -> float | None:
    """Return a number of a row as it is where its provider runs by itself."""
    if field != "tops":
        return row.get(f"sustained_{field}")
    return row["tops"] * row["ms"] / row["sustained_ms"] if "sustained_ms" in row else None


def evaluate(rows: Iterable[dict]) -> list[dict]:
    """Return ``target``, ``case``, ``provider``, ``required``, ``found``, ``met`` of rows meant.

    ``alone`` is the ratio of providers that run by themselves, each at the clock that its own power
    allows; ``met`` says what was found in turns, at a common clock.
    """
    results = []
    rows = list(rows)
    for target in TARGETS:
        for row in rows:
            if "skipped" in row or not target.applies(row):
                continue
            found = row.get(target.field)
            results.append(
                {
                    "target": target.text,
                    "case": row["case"],
                    "provider": row["provider"],
                    "required": target.required,
                    "found": found,
                    "alone": _alone(row, target.field),
                    "met": found is not None and found >= target.required,
                }
            )
    return results
