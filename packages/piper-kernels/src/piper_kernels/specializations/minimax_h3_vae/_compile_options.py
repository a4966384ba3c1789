"""Compile options of the MiniMax-H3 VAE."""

from collections.abc import Mapping


def minimax_h3_vae_convrot_int8_compile_options(
    options: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """Return ``torch.compile`` options for a decoder with ConvRot INT8 linears.

    The ordinary ConvRot INT8 pass runs first. Linears whose rows, outputs and inputs are one of
    the decoder's shapes then take a schedule of their own where the device has one (sm_120,
    gfx1200, gfx1201). Other shapes and devices keep the ordinary schedule, results are the same,
    and attention is not touched.

    Args:
        options: Options to extend; not modified. Passes in it are kept, in order.

    Returns:
        Options for ``torch.compile(model, options=...)``, which excludes ``mode=...``.
        Calling this again on the result changes nothing.
    """
    # Inductor loads when compilation is asked for, not when the package is imported.
    from piper_kernels.specializations.minimax_h3_vae._compile import compile_options

    return compile_options(options)


def minimax_h3_vae_convrot_int8_conv3d_compile_options(
    options: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """Return ``torch.compile`` options that fuse an encoder around its INT8 convolutions.

    Convolutions without padding absorb a reflected padding in front of them, a framewise group
    normalization with SiLU in front of that, and the addition of a residual. Only inference
    graphs of static shapes are rewritten, and only what has no other user. What does not match
    stays as it is.

    Args:
        options: Options to extend; not modified. Passes in it are kept, in order.

    Returns:
        Options for ``torch.compile(model, options=...)``, which excludes ``mode=...``.
        Calling this again on the result changes nothing.
    """
    from piper_kernels.specializations.minimax_h3_vae.conv3d._compile import compile_options

    return compile_options(options)
