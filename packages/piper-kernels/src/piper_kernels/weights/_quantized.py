"""What all quantized weight classes share: in-place updates and the rule of the graph cache."""

import weakref
from typing import Any, Self

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

from piper_kernels.weights._rebuild import cache_bypass, describe_metadata

# Inner tensors and the weight whose cache key was asked for.
_owners: Any = WeakIdKeyDictionary()


def _refuse_shared_tensors(weight: Any) -> None:
    """Keep graphs of several weights over one inner tensor out of the disk cache.

    Such a graph reads one operand for all of them, and the key, made of each weight alone,
    would give it to weights with tensors of their own.
    """
    for name in weight.__tensor_flatten__()[0]:
        inner = getattr(weight, name)
        owner = _owners.get(inner)
        if owner is not None and owner() is not None and owner() is not weight:
            raise cache_bypass(f"{type(weight).__name__} that shares its storage")
        _owners[inner] = weakref.ref(weight)


class QuantizedWeight:
    """Base of the weight classes, in front of their tensor base."""

    qdata: Tensor
    act_per_tensor_scale: Tensor | None

    def add_(self, other: Tensor, *, alpha: float = 1, rounding_seed: int | None = None) -> Self:
        """Add ``alpha * other`` to the weight in place and quantize it again.

        Args:
            other: ``[out, in]`` in the logical dtype, any strides.
            alpha: Finite coefficient; 0 writes nothing.
            rounding_seed: Seed in ``[0, 2**64)`` of stochastic rounding, so that repeated
                small updates are unbiased; ``None`` rounds to nearest.

        Raises:
            NotImplementedError: The weight is transposed or not a matrix.
            TypeError: An operand, coefficient or seed has the wrong type.
            ValueError: A shape, dtype, device, layout, coefficient or seed does not fit.
            RuntimeError: Gradients are enabled and an operand requires them.
        """
        self._add(other, alpha=alpha, rounding_seed=rounding_seed)
        return self

    def addmm_(
        self,
        mat1: Tensor,
        mat2: Tensor,
        *,
        beta: float = 1,
        alpha: float = 1,
        rounding_seed: int | None = None,
    ) -> Self:
        """Set the weight to ``beta * W + alpha * mat1 @ mat2`` in place, quantized again.

        Args:
            mat1: ``[out, rank]`` in the logical dtype, any strides.
            mat2: ``[rank, in]`` in the logical dtype, any strides.
            beta: Finite coefficient of the old weight; 0 does not read it.
            alpha: Finite coefficient of the product.
            rounding_seed: Seed in ``[0, 2**64)`` of stochastic rounding; ``None`` rounds to
                nearest.

        Raises:
            NotImplementedError, TypeError, ValueError, RuntimeError: As ``add_`` does.
        """
        self._addmm(mat1, mat2, beta=beta, alpha=alpha, rounding_seed=rounding_seed)
        return self

    def _add(self, other: Tensor, *, alpha: float, rounding_seed: int | None) -> None:
        raise NotImplementedError

    def _addmm(
        self, mat1: Tensor, mat2: Tensor, *, beta: float, alpha: float, rounding_seed: int | None
    ) -> None:
        raise NotImplementedError

    def _stable_hash_for_caching(self) -> str:
        """Describe the metadata that a compiled graph of this weight depends on.

        Raises:
            BypassAOTAutogradCache: The input scale is static, or another weight of the graph
                has an inner tensor of this one. The cache key cannot tell whether weights
                share tensors, so such graphs are not cached on disk.
        """
        if self.act_per_tensor_scale is not None:
            raise cache_bypass(f"{type(self).__name__} with a static input scale")
        _refuse_shared_tensors(self)
        return describe_metadata(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # torch 2.11 makes the cache key by pickling the fake weight and never asks the hook above.
        if isinstance(self.qdata, FakeTensor):
            if self.act_per_tensor_scale is not None:
                raise cache_bypass(f"{type(self).__name__} with a static input scale")
            _refuse_shared_tensors(self)
        return super().__reduce_ex__(protocol)
