"""Random inputs for measurements."""

from typing import Any

import torch
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Dtypes of random values by their names in facts."""


def random_tensor(shape: tuple[int, ...], dtype: str, device: Any) -> Tensor:
    """Returns normal values of standard deviation 0.1.

    Raises:
        NotImplementedError: for a dtype that is not bf16, fp16 or fp32.
    """
    if dtype not in DTYPES:
        raise NotImplementedError(f"no benchmark inputs of dtype {dtype!r}")
    generator = torch.Generator(device=device).manual_seed(0)
    values = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
    return values.mul(0.1).to(DTYPES[dtype])
