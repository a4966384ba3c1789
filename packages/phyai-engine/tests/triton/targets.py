"""Devices that kernels are compiled for; none of them needs to be here."""

from triton.backends.compiler import GPUTarget

TARGETS = {
    **{f"sm_{number}": GPUTarget("cuda", number, 32) for number in (80, 89, 90, 100, 120)},
    **{name: GPUTarget("hip", name, 32) for name in ("gfx1200", "gfx1201")},
}
