"""Compile options of sparse Piper attention between ConvRot INT8 linears."""

from collections.abc import Mapping


def convrot_int8_sparse_piper_compile_options(
    options: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """Return ``torch.compile`` options that fuse ConvRot INT8 linears with sparse attention.

    Three linears of one input ``[B, S, F]``, RMSNorm and split-half RoPE of the heads of queries
    and keys, and ``SparsePiperAttention`` become operators that project straight to quantized
    operands; an added ``sparse_piper_coarse_residual`` of the same operands becomes part of the
    attention. A linear behind it that alone reads it is computed by windows of rows, and
    so are queries and projected gates then. Norms are FP32 until the codes. What does not match,
    or runs on a target without kernels, stays as it is, and ordinary linears are rewritten as by
    ``piper_kernels.linear.convrot.convrot_int8_compile_options``.

    Args:
        options: Options to extend; not modified. Passes in it are kept, in order.

    Returns:
        Options for ``torch.compile(model, options=...)``, which excludes ``mode=...``.
        Calling this again on the result changes nothing.
    """
    # Inductor loads when compilation is asked for.
    from piper_kernels.fusions.convrot_int8_sparse_piper._compile import compile_options

    return compile_options(options)
