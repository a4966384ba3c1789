"""Compile options of sparse Piper attention between NVFP4 linears."""

from collections.abc import Mapping


def nvfp4_sparse_piper_compile_options(
    options: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """Return ``torch.compile`` options that fuse NVFP4 linears with sparse attention.

    Three linears of one input ``[1, S, F]``, RMSNorm and split-half RoPE of the heads of queries
    and keys, and ``SparsePiperAttention`` become operators that project straight to quantized
    operands; an added ``sparse_piper_coarse_residual`` of the same operands becomes part of the
    attention. A linear behind it that alone reads it becomes part of it too: with a static
    input scale the attention exists for windows of rows alone, a dynamic one covers all rows.
    Norms are FP32 until the codes. What does not match, or runs on a target without kernels,
    stays as it is, and ordinary linears are rewritten as by
    ``piper_kernels.linear.nvfp4.nvfp4_compile_options``.

    Args:
        options: Options to extend; not modified. Passes in it are kept, in order.

    Returns:
        Options for ``torch.compile(model, options=...)``, which excludes ``mode=...``.
        Calling this again on the result changes nothing.
    """
    # Inductor loads when compilation is asked for.
    from piper_kernels.fusions.nvfp4_sparse_piper._compile import compile_options

    return compile_options(options)
