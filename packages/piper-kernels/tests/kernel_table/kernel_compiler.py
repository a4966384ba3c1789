"""Compiles kernels for GPUs that are not here, and reads what the machine code needs."""

import re
import subprocess
from dataclasses import dataclass
from tempfile import NamedTemporaryFile

import triton
from machine_code import TARGETS, source_of

from piper_kernels._triton.mixed_sign import mixed_sign_dots

MULTIPLES_OF_16 = {
    "depth",
    "features",
    "key_batch_stride",
    "key_head_stride",
    "key_row_stride",
    "out_row_stride",
    "query_batch_stride",
    "query_head_stride",
    "query_row_stride",
    "row_stride",
    "source_row_stride",
    "split_depth",
    "stored_keys",
    "stored_queries",
    "value_batch_stride",
    "value_head_stride",
    "value_row_stride",
    "width",
    "word_row_stride",
    "x_row_stride",
}


@dataclass(frozen=True)
class Usage:
    """What one thread of a kernel needs, ``None`` where the tools do not say.

    Attributes:
        registers: Registers: of a thread on NVIDIA GPUs, vector registers on AMD GPUs.
        spilled: Bytes of stack on NVIDIA GPUs, spilled vector registers on AMD GPUs.
        shared: Bytes of shared memory of a program.
        traps: Whether the compiler gave up and left a kernel that only traps.
    """

    registers: int | None
    spilled: int | None
    shared: int | None
    traps: bool = False

    def __str__(self):
        if self.traps:
            return "traps"
        registers = "compiles" if self.registers is None else str(self.registers)
        return f"{registers} ({self.spilled} spilled)" if self.spilled else registers


def build(case, target: str):
    """Return a case, compiled with the argument types and alignment of its launcher."""
    with mixed_sign_dots():
        source, options = _source(case, target), dict(case.options)
        return triton.compile(source, target=TARGETS[target], options=options)


def compile_kernel(case, target: str) -> Usage:
    """Compile a case and return what it needs."""
    return usage_of(build(case, target), target)


def usage_of(compiled, target: str) -> Usage:
    """Return what a compiled kernel needs."""
    gpu = TARGETS[target]
    binary = compiled.asm["cubin" if gpu.backend == "cuda" else "hsaco"]
    assert binary[:4] == b"\x7fELF"
    shared = compiled.metadata.shared
    if gpu.backend == "hip":
        text = compiled.asm["amdgcn"]
        return Usage(_field(text, "vgpr_count"), _field(text, "vgpr_spill_count"), shared)
    if re.search(r"^\s*trap;", compiled.asm["ptx"], re.MULTILINE):
        return Usage(None, None, shared, traps=True)
    return _nvidia_usage(binary, shared)


def _source(case, target: str):
    kernel, constants = case.load(), case.constants_for(target)
    signature = {}
    for name in kernel.arg_names:
        default = "i64" if name.endswith("_stride") else "i32"
        signature[name] = "constexpr" if name in constants else case.types.get(name, default)
    assert set(constants) <= set(kernel.arg_names), set(constants) - set(kernel.arg_names)
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or (name in MULTIPLES_OF_16 and name not in constants)
    }
    return source_of(kernel, signature, constants, aligned, gluon=case.gluon)


def _field(text: str, name: str) -> int | None:
    found = re.search(rf"\.{name}:\s*(\d+)", text)
    return int(found[1]) if found else None


def _nvidia_usage(binary: bytes, shared: int) -> Usage:
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        command = [tool, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return Usage(int(found[1]), int(found[2]), shared)
