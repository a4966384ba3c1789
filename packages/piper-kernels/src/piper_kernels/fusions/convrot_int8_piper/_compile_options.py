"""Compile options of dense Piper attention between ConvRot INT8 linears."""

from collections.abc import Mapping


def convrot_int8_piper_compile_options(
    options: Mapping[str, object] | None = None, *, fuse_output: bool = False
) -> dict[str, object]:
    """Return ``torch.compile`` options that fuse ConvRot INT8 linears with dense attention.

    Linears of ``[B, S, F]``, RMSNorm and split-half RoPE of the heads of queries and keys, and
    ``piper_attention`` become operators that project straight to quantized operands. Keys and
    values may have fewer heads and come from another input; where they do not match, queries
    alone are projected so. Norms are FP32 until the codes. What does not match, or runs on a
    target without kernels, stays as it is, and ordinary linears are rewritten as by
    ``piper_kernels.linear.convrot.convrot_int8_compile_options``.

    Args:
        options: Options to extend; not modified. Passes in it are kept, in order.
        fuse_output: Whether a linear behind the attention that alone reads it becomes part of it:
            queries and attention exist for windows of rows alone then.

    Returns:
        Options for ``torch.compile(model, options=...)``, which excludes ``mode=...``.
        Calling this again on the result changes nothing.
    """
    # Inductor loads when compilation is asked for.
    from piper_kernels.fusions.convrot_int8_piper._compile import compile_options

    return compile_options(options, fuse_output=fuse_output)
