"""Compile options of GELU networks of ConvRot INT8 linears."""

from collections.abc import Mapping


def convrot_int8_gelu_ffn_compile_options(
    options: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """Return ``torch.compile`` options that fuse GELU networks of ConvRot INT8 linears.

    ``down(gelu(up(x), approximate="tanh"))`` in float16 or bfloat16, whose intermediate values
    are used nowhere else, becomes one operator that computes a bounded number of rows at a time;
    a gated residual update behind it becomes part of it. Every projection keeps its bias and its
    static or dynamic input scale. The activation is computed in FP32. What does not match stays
    as it is, and ordinary linears are rewritten as by
    ``piper_kernels.linear.convrot.convrot_int8_compile_options``.

    Args:
        options: Options to extend; not modified. Passes in it are kept, in order.

    Returns:
        Options for ``torch.compile(model, options=...)``, which excludes ``mode=...``.
        Calling this again on the result changes nothing.
    """
    # Inductor loads when compilation is asked for.
    from piper_kernels.fusions._ffn.convrot_int8_compile import gelu_compile_options

    return gelu_compile_options(options)
