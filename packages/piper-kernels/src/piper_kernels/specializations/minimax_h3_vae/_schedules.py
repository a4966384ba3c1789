"""Schedules of the decoder's linears. Needs neither Triton nor a device."""

from piper_kernels._triton.targets import AcceleratorTarget

Schedule = tuple[int, int, int, int, int]
"""Rows, columns and depth of a tile, warps of a program, steps in flight."""

Shape = tuple[int, int, int]
"""Rows, output features and input features."""

_SQUARE = (128, 128, 128, 4, 2)
_SHALLOW = (128, 128, 64, 8, 3)
_RDNA4 = (128, 128, 64, 8, 2)

_SM120_ROWS = (1797, 3594, 7188)
_WEIGHTS = ((2048, 2048), (16384, 2048), (2048, 8192))
_SM120: dict[Shape, Schedule] = {
    (rows, *weight): _SQUARE if rows != 3594 and weight[0] == 2048 else _SHALLOW
    for rows in _SM120_ROWS
    for weight in _WEIGHTS
}
_GFX120X: dict[Shape, Schedule] = {
    (1797, 2048, 2048): _RDNA4,
    (1797, 2048, 8192): _RDNA4,
    (3594, 2048, 8192): _RDNA4,
}
_TABLES = {"sm_120": _SM120, "gfx1200": _GFX120X, "gfx1201": _GFX120X}


def find_schedule(target: AcceleratorTarget | None, shape: Shape) -> Schedule | None:
    """Return the schedule of a linear on a device, ``None`` for the ordinary one."""
    return None if target is None else _TABLES.get(target.architecture, {}).get(shape)
