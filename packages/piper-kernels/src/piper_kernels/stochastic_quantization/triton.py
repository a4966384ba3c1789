"""Stochastic rounding for Triton kernels. Importing this module requires Triton."""

import triton
import triton.language as tl

from piper_kernels.stochastic_quantization._seed import signed_seed

__all__ = ["random_uniform", "seed_argument", "stochastic_round_to_int"]


def seed_argument(seed: int | None) -> int:
    """Return a seed as the signed scalar of a kernel launch; ``None`` becomes 0.

    A seed of ``2**63`` or more keeps its 64-bit pattern as a negative number.
    """
    return 0 if seed is None else signed_seed(seed)


@triton.jit
def random_uniform(seed, offsets):  # noqa: ANN001, ANN201  # device function
    """Draw FP32 uniforms in ``[0, 1)`` with Philox-4x32-10, one per logical offset.

    Args:
        seed: Integer scalar, see ``seed_argument``.
        offsets: Non-negative element offsets in the whole logical tensor
            (``row * width + column``). All 64 bits select the sample, so the draw depends
            neither on the launch geometry nor repeats after ``2**32`` elements.

    Returns:
        FP32 block with the shape of ``offsets``.
    """
    counter = offsets.to(tl.uint64)
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = (counter >> 32).to(tl.uint32)
    zero = low * 0
    word, _, _, _ = tl.philox(seed, low, high, zero, zero)
    return tl.uint_to_uniform_float(word)


@triton.jit
def stochastic_round_to_int(  # noqa: ANN201  # device function
    values,  # noqa: ANN001
    deterministic,  # noqa: ANN001
    seed,  # noqa: ANN001
    offsets,  # noqa: ANN001
    QMIN: tl.constexpr,
    QMAX: tl.constexpr,
):
    """Round a block to one of the two adjacent integers, unbiased in expectation.

    Elements at or outside ``(QMIN, QMAX)``, exact integers and NaN take the value of
    ``deterministic``.

    Args:
        values: FP32 block in units of the quantization step.
        deterministic: Block of codes for elements that are not rounded.
        seed: Integer scalar, see ``seed_argument``.
        offsets: Logical element offsets, see ``random_uniform``.
        QMIN: Smallest code.
        QMAX: Largest code.

    Returns:
        Block with the dtype of ``deterministic``.
    """
    lower = tl.floor(values)
    fraction = values - lower
    rounded = lower + (random_uniform(seed, offsets) < fraction).to(tl.float32)
    interior = (values > QMIN) & (values < QMAX) & (fraction > 0)
    return tl.where(interior, rounded.to(deterministic.dtype), deterministic)
