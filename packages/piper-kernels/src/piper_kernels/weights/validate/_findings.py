"""What a validation reports."""

from dataclasses import dataclass
from enum import StrEnum


class Check(StrEnum):
    """What is wrong with a tensor."""

    FILE = "file"  # the file is truncated or its header breaks the format
    STORAGE = "storage"  # shapes, dtypes or the description do not fit together
    MARKER = "marker"  # a marker is legacy, incomplete or contradicts something
    UNMARKED = "unmarked"  # codes or scales that no description explains
    NAN = "nan"
    INFINITE = "infinite"
    ZERO = "zero"
    NEGATIVE = "negative"
    PADDING = "padding"  # bytes outside of the matrix that must be zero


@dataclass(frozen=True)
class Finding:
    """One problem of one tensor.

    Attributes:
        tensor: Name of the weight or dense tensor; of the file for ``Check.FILE``.
        field: Inner tensor (``"scale"``, ``"qdata"``, ...), empty for the whole.
        check: The kind of problem.
        message: What was seen and what it means.
    """

    tensor: str
    field: str
    check: Check
    message: str

    def __str__(self) -> str:
        where = f"{self.tensor}.{self.field}" if self.field else self.tensor
        return f"{where}: {self.check}: {self.message}"
