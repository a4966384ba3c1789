"""Compile options of ConvRot INT8 linears."""

from collections.abc import Mapping


def convrot_int8_compile_options(
    options: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """Return ``torch.compile`` options that rewrite ConvRot INT8 linears of inference graphs.

    Linears of one input prepare it once, GELU (tanh) between two linears is computed by the
    preparation, in FP32, and views that flatten and restore rows around linears are removed.
    What does not match stays as it is.

    Args:
        options: Options to extend; not modified. Passes in it are kept, in order.

    Returns:
        Options for ``torch.compile(model, options=...)``, which excludes ``mode=...``.
        Calling this again on the result changes nothing.
    """
    # Inductor loads when compilation is asked for, not when a linear is imported.
    from piper_kernels.linear.convrot.int8._compile import compile_options

    return compile_options(options)
