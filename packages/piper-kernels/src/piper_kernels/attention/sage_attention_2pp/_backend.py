"""Selection of the code that executes SageAttention2++."""

from torch import Tensor

from piper_kernels._triton.targets import accelerator_target
from piper_kernels.attention._backends import AttentionBackend, AttentionRequest, select_backend
from piper_kernels.attention.sage_attention_2pp import reference
from piper_kernels.attention.sage_attention_2pp._fp8 import Fp8Backend
from piper_kernels.attention.sage_attention_2pp._hopper import HopperBackend


class PortableBackend:
    """Executes the reference; supports everything."""

    name = "portable"

    def support(self, _request: AttentionRequest, /) -> tuple[bool, str]:
        """Return that every call is supported."""
        return True, ""

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool
    ) -> Tensor:
        """Return the attention with scales per thread."""
        return reference.attention(query, key, value, scale, is_causal)


# In order of preference.
BACKENDS: tuple[AttentionBackend, ...] = (
    HopperBackend(),
    Fp8Backend(),
    PortableBackend(),
)


def backend_for(query: Tensor, is_causal: bool) -> AttentionBackend:
    """Return the backend that executes a call with queries ``[..., D]``.

    Operators ask at execution time, so a compiled graph follows a change of backend.
    """
    request = AttentionRequest(accelerator_target(query.device), query.shape[-1], is_causal)
    return select_backend(BACKENDS, request)
