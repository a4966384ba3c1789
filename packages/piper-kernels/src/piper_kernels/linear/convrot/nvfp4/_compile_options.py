"""Compile options of ConvRot NVFP4 linears."""

from collections.abc import Mapping


def convrot_nvfp4_compile_options(
    options: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """Return ``torch.compile`` options that rewrite ConvRot NVFP4 linears of inference graphs.

    The rewrites are those of ``piper_kernels.linear.nvfp4.nvfp4_compile_options``.

    Args:
        options: Options to extend; not modified. Passes in it are kept, in order.

    Returns:
        Options for ``torch.compile(model, options=...)``, which excludes ``mode=...``.
        Calling this again on the result changes nothing.
    """
    from piper_kernels.linear.nvfp4._compile import convrot_compile_options

    return convrot_compile_options(options)
