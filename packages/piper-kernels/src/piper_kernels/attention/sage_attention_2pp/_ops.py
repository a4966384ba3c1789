"""The custom operator of SageAttention2++. Its fake computes shapes only."""

import torch
from torch import Tensor

from piper_kernels.attention.sage_attention_2pp._backend import backend_for


@torch.library.custom_op("piper_kernels::sage_attention_2pp", mutates_args=())
def sage_attention_2pp(
    query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool
) -> Tensor:
    """Return the attention of floating operands, contiguous in the dtype of ``query``."""
    return backend_for(query, is_causal).attention(query, key, value, scale, is_causal)


@sage_attention_2pp.register_fake
def _(query: Tensor, _key: Tensor, _value: Tensor, _scale: float, _is_causal: bool) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)
