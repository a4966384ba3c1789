"""Compile options of NVFP4 linears."""

from collections.abc import Mapping


def nvfp4_compile_options(options: Mapping[str, object] | None = None) -> dict[str, object]:
    """Return ``torch.compile`` options that rewrite NVFP4 linears of inference graphs.

    Linears of one input that quantize it prepare it once, GELU (tanh) and SwiGLU of packed
    ``[up | gate]`` in front of a linear are computed by the preparation, in FP32, and views
    that flatten and restore rows around linears are removed. What does not match stays as it
    is.

    Args:
        options: Options to extend; not modified. Passes in it are kept, in order.

    Returns:
        Options for ``torch.compile(model, options=...)``, which excludes ``mode=...``.
        Calling this again on the result changes nothing.
    """
    from piper_kernels.linear.nvfp4._compile import compile_options

    return compile_options(options)
