"""The contract of numbers of rows that callers of fused operators choose."""


def require_rows(name: str, rows: int, multiple: int = 1) -> None:
    """Check a number of rows.

    Args:
        name: Of the argument, for messages.
        rows: Its value.
        multiple: What it must be a positive multiple of.

    Raises:
        TypeError: It is no integer.
        ValueError: It is no positive multiple.
    """
    if isinstance(rows, bool) or not isinstance(rows, int):
        raise TypeError(f"{name} must be an integer, got {type(rows).__name__}")
    if rows <= 0 or rows % multiple:
        unit = "a positive integer" if multiple == 1 else f"a positive multiple of {multiple}"
        raise ValueError(f"{name} must be {unit}, got {rows}")
