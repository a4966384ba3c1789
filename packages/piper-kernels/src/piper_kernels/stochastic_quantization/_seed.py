"""Seeds of stochastic rounding: public unsigned range and the signed form of op schemas."""

from typing import TypeGuard

_SEED_BITS = 64


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def validate_seed(seed: object) -> None:
    """Raise unless ``seed`` is an ``int`` with ``0 <= seed < 2**64``.

    Raises:
        TypeError: ``seed`` is a ``bool`` or no integer.
        ValueError: ``seed`` is out of range.
    """
    if not _is_integer(seed):
        raise TypeError(
            f"rounding seed must be an unsigned 64-bit integer, got {type(seed).__name__}"
        )
    if not 0 <= seed < 1 << _SEED_BITS:
        raise ValueError(
            f"rounding seed must be an unsigned 64-bit integer (0 <= seed < 2**64), got {seed}"
        )


def signed_seed(seed: int) -> int:
    """Return the signed 64-bit integer that has the bit pattern of an unsigned seed.

    Op schemas and kernel launches carry seeds as signed values;
    ``torch.Generator.manual_seed`` maps both forms to the same state.
    """
    return seed - (1 << _SEED_BITS) if seed >= 1 << (_SEED_BITS - 1) else seed
