"""What quantized linears are meant to reach on an H200, and what a run found."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A bound on a number of a row.

    Attributes:
        text: What is required, in words.
        required: Least value.
        applies: Whether a row is meant.
        value: The number, or ``None`` where it is missing.
    """

    text: str
    required: float
    applies: Callable[[dict], bool]
    value: Callable[[dict, list[dict]], float | None]


def _row(rows: list[dict], case: str, provider: str) -> dict:
    return next((r for r in rows if (r["case"], r["provider"]) == (case, provider)), {})


def _product_times(provider: str) -> Callable[[dict, list[dict]], float | None]:
    def value(row: dict, rows: list[dict]) -> float | None:
        ours, theirs = row.get("product_tops"), _row(rows, row["case"], provider)
        base = theirs.get("product_tops")
        return ours / base if ours and base else None

    return value


def _field(name: str) -> Callable[[dict, list[dict]], float | None]:
    return lambda row, _rows: row.get(name)


def _is(provider: str, *, size: tuple[int, int] | None = None) -> Callable[[dict], bool]:
    return lambda row: (
        row["provider"] == provider
        and row["activation"] is None
        and (size is None or (row["n"], row["k"]) == size)
    )


def _and(first: Callable[[dict], bool], second: Callable[[dict], bool]) -> Callable[[dict], bool]:
    return lambda row: first(row) and second(row)


_INT8, _SQUARE = _is("piper_int8"), (8192, 8192)
_CUBE = _and(_is("piper_int8", size=_SQUARE), lambda row: row["m"] == 8192)
_FOUR_BIT = ("piper_nvfp4", "piper_convrot_nvfp4")


def _targets() -> Iterator[Target]:
    yield Target("INT8 product, TOP/s", 1250, _CUBE, _field("product_tops"))
    yield Target("INT8 product over cuBLAS INT8", 1.3, _CUBE, _product_times("int_mm"))
    large, middle = (lambda row: row["m"] >= 4096), (lambda row: row["m"] == 1024)
    yield Target("INT8 linear over bf16", 1.4, _and(_INT8, large), _field("times_bf16"))
    yield Target("INT8 linear over bf16", 1.2, _and(_INT8, middle), _field("times_bf16"))
    yield Target("INT8 preparation over a copy", 0.7, _and(_INT8, large), _field("of_copy"))
    for provider in _FOUR_BIT:
        square = _is(provider, size=_SQUARE)
        few = _and(square, lambda row: row["m"] <= 16)
        many = _and(square, lambda row: row["m"] == 1024)
        yield Target(f"{provider} over bf16", 2.0, few, _field("times_bf16"))
        yield Target(f"{provider} over bf16", 0.9, many, _field("times_bf16"))
    humming = _and(_is("humming_w4a16", size=_SQUARE), lambda row: row["m"] <= 64)
    yield Target("Humming W4A16 over bf16", 2.0, humming, _field("times_bf16"))


TARGETS = tuple(_targets())


def evaluate(rows: list[dict]) -> list[dict]:
    """Return ``target``, ``case``, ``required``, ``found`` and ``met`` for every row meant."""
    results = []
    for target in TARGETS:
        for row in rows:
            if not target.applies(row) or "skipped" in row:
                continue
            found = target.value(row, rows)
            results.append(
                {
                    "target": target.text,
                    "case": row["case"],
                    "required": target.required,
                    "found": found,
                    "met": found is not None and found >= target.required,
                }
            )
    return results
