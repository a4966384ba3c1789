"""Compiles kernels to machine code for GPUs that are not here."""

import re
import subprocess

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx1200": GPUTarget("hip", "gfx1200", 32),
    "gfx1201": GPUTarget("hip", "gfx1201", 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SUPPORTED = tuple(name for name in TARGETS if name != "gfx942")
"""Targets that every kernel is written for; some compile for gfx942 too."""


def unsupported(target):
    """Return why this Triton cannot compile for a target, ``""`` when it can."""
    gpu = TARGETS[target]
    name = {"cuda": "nvidia", "hip": "amd"}[gpu.backend]
    backend = triton.backends.backends.get(name)
    if backend is None:
        return f"this Triton has no {name} backend"
    return "" if backend.compiler.supports_target(gpu) else f"this Triton does not know {target}"


def build(kernel, target, constants, types, *, aligned=(), options=None, gluon=False):
    """Compile a kernel; a target that this Triton does not know skips the test.

    Args:
        kernel: The kernel.
        target: A name of ``TARGETS``.
        constants: Compile-time arguments.
        types: Types of pointers and of arguments that are not 32-bit sizes, by name; names that
            the kernel does not have are left out.
        aligned: Names of arguments that are multiples of 16.
        options: Compiler options of the launcher.
        gluon: Whether the kernel is written in Gluon.
    """
    if reason := unsupported(target):
        pytest.skip(reason)
    names = list(kernel.arg_names)
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if name in aligned and name not in constants
    }
    source = source_of(kernel, signature, constants, attributes, gluon=gluon)
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    binary = compiled.asm["cubin" if TARGETS[target].backend == "cuda" else "hsaco"]
    assert binary[:4] == b"\x7fELF"
    return compiled


def source_of(kernel, signature, constants, attributes, *, gluon):
    """Return what Triton compiles."""
    if not gluon:
        return ASTSource(kernel, signature, constants, attributes)
    from triton.experimental.gluon._runtime import GluonASTSource

    # Keyword arguments: their order differs between versions.
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    return GluonASTSource(fn=kernel, signature=signature, constexprs=places, attrs=attributes)


def pointers(types):
    """Return the names of pointers; what allocators return is aligned."""
    return [name for name, kind in types.items() if kind.startswith("*")]


def stack_bytes(compiled, folder):
    """Return the bytes of stack of a kernel for an NVIDIA GPU: registers that are spilled."""
    path = folder / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", text)[1])
