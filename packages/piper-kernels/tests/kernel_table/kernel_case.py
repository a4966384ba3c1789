"""A kernel with the arguments of its launchers, and the targets it is compiled for."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field

ALL = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx1200", "gfx1201", "gfx942")
CUDA = ALL[:5]
NATIVE_FP4 = ("sm_100", "sm_120")


@dataclass(frozen=True)
class KernelCase:
    """A kernel with constants.

    Attributes:
        module: Module below ``piper_kernels``.
        kernel: Name of the kernel.
        variant: What tells cases of one kernel apart.
        constants: Compile-time arguments. A function of the target gives one that depends on it.
        types: Types of pointers and of arguments that are not 32-bit sizes.
        options: Compiler options of the launcher.
        targets: Where a launcher uses it.
        gluon: Whether the kernel is written in Gluon.
    """

    module: str
    kernel: str
    variant: str
    constants: Mapping[str, object]
    types: Mapping[str, str]
    options: Mapping[str, object] = field(default_factory=dict)
    targets: tuple[str, ...] = ALL
    gluon: bool = False

    @property
    def name(self) -> str:
        """Module, kernel and variant."""
        return f"{self.module}.{self.kernel} {self.variant}".rstrip()

    def load(self):
        """Return the kernel."""
        return getattr(importlib.import_module(f"piper_kernels.{self.module}"), self.kernel)

    def constants_for(self, target: str) -> dict[str, object]:
        """Return the constants on a target."""
        return {
            name: value(target) if callable(value) else value
            for name, value in self.constants.items()
        }


def native(target):
    """Return whether a target converts to E2M1 with one instruction."""
    return target in NATIVE_FP4


def precision(target):
    """Return the ``input_precision`` of FP32 products on a target."""
    return "tf32x3" if target in CUDA else "ieee"
