"""Original shapes that GGUF files of ComfyUI keep beside tensors stored under another shape."""

import math
from collections.abc import Mapping, Sequence

from piper_kernels.weights.io._errors import WeightFileError

_PREFIX = "comfy.gguf.orig_shape."


def original_gguf_shape(
    name: str, stored_shape: Sequence[int], metadata: Mapping[str, Sequence[int]]
) -> tuple[int, ...]:
    """Return the shape that a tensor of a GGUF file has in its model.

    Converters reshape tensors whose rows do not fill a block and note the original shape. The
    codes follow the stored rows: decode with the stored shape, then ``view`` the dense values.

    Args:
        name: Tensor name.
        stored_shape: Logical shape of the stored tensor, ``[rows, features]``.
        metadata: Key-value fields of the file.

    Returns:
        ``comfy.gguf.orig_shape.<name>`` if the file has it, else ``stored_shape``.

    Raises:
        WeightFileError: The original shape holds another number of elements.
    """
    original = tuple(int(size) for size in metadata.get(_PREFIX + name, stored_shape))
    if math.prod(original) != math.prod(stored_shape) or any(size < 0 for size in original):
        raise WeightFileError(
            f"{name}: {_PREFIX}{name} is {list(original)} with {math.prod(original)} elements, "
            f"but the stored shape {list(stored_shape)} has {math.prod(stored_shape)}"
        )
    return original
