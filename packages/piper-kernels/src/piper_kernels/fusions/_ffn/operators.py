"""The two custom operators of a kind of networks: with a result, and with a gated update."""

from collections.abc import Callable

import torch
from torch import Tensor

GATED_UPDATES = (
    "Tensor base",
    "Tensor(a!) reusable_update",
    "Tensor update_gate",
    "Tensor ffn_gate",
    "Tensor gate_indices",
    "bool python_indexing",
)
"""Arguments of a gated update, in the order of ``GatedUpdates``."""


def define_pair(
    name: str,
    schema: Callable[..., str],
    run: Callable[..., Tensor],
    fake: Callable[..., Tensor],
    update: Callable[..., None],
) -> tuple[Callable[..., Tensor], Callable[..., None]]:
    """Define ``piper_kernels::<name>`` and ``piper_kernels::<name>_gated_updates_``.

    Args:
        name: Name of the operator that returns the result of the network.
        schema: Returns the arguments in parentheses; takes those of a gated update.
        run: Returns the result.
        fake: Returns an uninitialized result.
        update: Overwrites ``reusable_update``.
    """
    network = torch.library.custom_op(
        f"piper_kernels::{name}", run, mutates_args=(), schema=f"{schema()} -> Tensor"
    )
    network.register_fake(fake)
    gated = torch.library.custom_op(
        f"piper_kernels::{name}_gated_updates_",
        update,
        mutates_args=("reusable_update",),
        schema=f"{schema(*GATED_UPDATES)} -> ()",
    )
    return network, gated
