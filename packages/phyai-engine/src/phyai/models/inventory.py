"""What the models of a plugin consist of: kernel call sites, linears, bytes."""

from torch import Tensor, nn

from phyai.dispatch import CallSite
from phyai.layers import Linear


def call_sites(*models: nn.Module) -> list[CallSite]:
    """Returns the kernel call sites of models, in module order."""
    return [
        value
        for model in models
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, CallSite)
    ]


def linear_layers(*models: nn.Module) -> list[Linear]:
    """Returns the layers whose weights have formats, in module order."""
    return [module for model in models for module in model.modules() if isinstance(module, Linear)]


def weight_bytes(model: nn.Module) -> int:
    """Returns the bytes of all parameters, of packed ones as they are stored."""
    return sum(_stored_bytes(parameter) for parameter in model.parameters())


def _stored_bytes(tensor: Tensor) -> int:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return tensor.numel() * tensor.element_size()
    return sum(_stored_bytes(getattr(tensor, name)) for name in flatten()[0])
