"""Every kernel of the package with the arguments of its launchers."""

import ast
from pathlib import Path

from kernel_attention_cases import preparation_cases
from kernel_case import CUDA, KernelCase, native, precision
from kernel_conv3d_cases import conv3d_cases
from kernel_linear_cases import fusion_cases, int8_cases, nvfp4_cases
from kernel_mixed_sign_cases import mixed_sign_cases
from kernel_projection_cases import projection_cases
from kernel_sm90_cases import coarse_cases, sm90_cases

import piper_kernels
from piper_kernels.gguf import GGUFQuantizationType

Q4_K = int(GGUFQuantizationType.Q4_K)


def _weights():
    source = {"source": "*bf16", "scale": "*fp32", "row_stride": "i64"}
    strides = {"left_row_stride": "i64", "left_column_stride": "i64", "right_row_stride": "i64"}
    numbers = {"alpha": "fp32", "beta": "fp32", "seed": "i64"}
    module, words = "weights.convrot.int8._row_kernels", {"qdata_words": "*i32", "words": "*i32"}
    for stochastic in (False, True):
        flags = {"GROUP": 256, "READ_BASE": stochastic, "STOCHASTIC": stochastic}
        variant = "stochastic update" if stochastic else "from_hp"
        rows = {"ROWS": 1, "SIZE": 8192, "COUNT": 1}
        types = source | words | numbers | {"qdata": "*i8"}
        warps = {"num_warps": 8}
        yield KernelCase(module, "fused_rows_kernel", variant, flags | rows, types, warps)
        wide = flags | {"SIZE": 4096}
        yield KernelCase(module, "wide_rows_kernel", variant, wide, types, warps)
    module = "weights.convrot.int8._product_kernels"
    tile = {"ROWS": 64, "COLUMNS": 128, "DEPTH": 32, "PRECISION": precision, "READ_BASE": True}
    factors = {"left": "*bf16", "right": "*fp32", "amax_bits": "*i32"}
    types = source | words | numbers | strides | factors | {"qdata": "*i8"}
    for encode in (False, True):
        flags = {"STOCHASTIC": encode, "ENCODE": encode}
        variant = "encode" if encode else "amax"
        constants = tile | flags
        yield KernelCase(module, "product_kernel", variant, constants, types, {"num_warps": 8})
    types = {"amax_bits": "*i32", "scale": "*fp32"}
    yield KernelCase(module, "store_scales_kernel", "", {"SIZE": 1024}, types)
    types = source | {"out": "*fp32"}
    constants = {"GROUP": 256, "SIZE": 1024}
    yield KernelCase("_triton.products", "rotate_rows_kernel", "", constants, types)


def _nvfp4_weights():
    storage = {"qdata": "*u8", "scale": "*u8", "bytes": "*u8", "words": "*i32"}
    storage |= {"qdata_words": "*i32", "amax_bits": "*i32", "global_scale": "*fp32"}
    storage |= {"source": "*bf16", "left": "*bf16", "right": "*fp32", "e2m1": "*fp32"}
    storage |= {"alpha": "fp32", "beta": "fp32", "seed": "i64", "row_stride": "i64"}
    storage |= {"left_row_stride": "i64", "left_column_stride": "i64", "right_row_stride": "i64"}
    layout = {"TWO_LEVEL": True, "SWIZZLED": True, "HIGH_FIRST": False, "NATIVE": native}
    module = "weights.nvfp4._update_kernels"
    for pack in (False, True):
        flags = layout | {"PACK": pack, "STOCHASTIC": pack}
        variant = "pack" if pack else "amax"
        dense = flags | {"GROUP": 64, "ROWS": 8, "COLUMNS": 256}
        yield KernelCase(module, "dense_kernel", variant, dense, storage)
        tile = {"ROWS": 64, "COLUMNS": 64, "DEPTH": 32, "PRECISION": precision, "READ_BASE": True}
        yield KernelCase(module, "product_kernel", variant, flags | tile, storage)
    yield KernelCase(module, "store_global_scale_kernel", "", {}, storage)
    module = "weights.nvfp4._quantize_kernels"
    for group in (0, 256):
        tile = {"GROUP": group, "ROWS": 16, "COLUMNS": 256}
        yield KernelCase(module, "amax_kernel", f"g{group}", tile, storage)
        flags = {"TWO_LEVEL": True, "SWIZZLED": True, "NATIVE": native, "EXPERTS": False}
        constants = tile | flags | {"ROWS": 8}
        yield KernelCase(module, "pack_kernel", f"g{group}", constants, storage)


def _gguf():
    types = {"data": "*u8", "words": "*i32", "scale": "*fp32", "maxima": "*fp32"}
    constants = {"TYPE": Q4_K, "GROUP": 256}
    module = "weights.convrot.int8.gguf_triton"
    fused = constants | {"ROWS": 1, "SIZE": 4096, "COUNT": 1}
    yield KernelCase(module, "convert_rows_kernel", "Q4_K", fused, types)
    tile = constants | {"TILE": 256}
    yield KernelCase(module, "tile_maxima_kernel", "Q4_K", tile, types)
    constants = tile | {"TILES": 64}
    yield KernelCase(module, "convert_tiles_kernel", "Q4_K", constants, types)
    module = "weights.convrot.nvfp4.gguf_triton"
    types = {"data": "*u8", "amax_bits": "*i32", "per_tensor_scale": "*fp32"}
    types |= {"qdata_words": "*i32", "scale": "*u8"}
    tile = {"TYPE": Q4_K, "GROUP": 256, "ROWS": 2, "COLS": 256}
    yield KernelCase(module, "amax_kernel", "Q4_K", tile, types, targets=CUDA)
    flags = {"TWO_LEVEL": True, "COMPUTED": True, "SWIZZLED": True, "HIGH_FIRST": False}
    constants = tile | flags | {"NATIVE": native}
    yield KernelCase(module, "pack_kernel", "Q4_K", constants, types, targets=CUDA)


CASES = (
    *_weights(),
    *_nvfp4_weights(),
    *_gguf(),
    *int8_cases(),
    *nvfp4_cases(),
    *fusion_cases(),
    *projection_cases(),
    *preparation_cases(),
    *mixed_sign_cases(),
    *sm90_cases(),
    *coarse_cases(),
    *conv3d_cases(),
)


def package_kernels() -> set[str]:
    """Return ``module.kernel`` of all kernels of the package."""
    root, found = Path(piper_kernels.__file__).parent, set()
    for path in root.rglob("*.py"):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
                if any(text.startswith(("triton.jit", "gluon.jit")) for text in decorators):
                    found.add(f"{module}.{node.name}")
    return found
