"""The two cameras: anti-aliased drawing from distance fields, vectorised over a batch.

Every shape is a signed distance in workspace units (negative inside); its coverage of a pixel is a
ramp one pixel wide around zero, so the same functions serve any resolution and any zoom.
"""

from enum import Enum

import torch
from torch import Tensor

from reach.instructions import COLOURS
from reach.world import DISC_RADIUS, WORKSPACE, Layout

IMAGE_SIZE = 84
_TABLE = (0.27, 0.30, 0.35)
_MAT = (0.94, 0.93, 0.89)
_GRID = (0.84, 0.84, 0.81)
_SHADOW = (0.12, 0.12, 0.16)
_INK = (0.10, 0.11, 0.15)
_WHITE = (1.0, 1.0, 1.0)
_GRID_PITCH = 0.25
_LIGHT = (-0.05, 0.06)
"""Direction towards the light; shadows fall the other way."""


class View(Enum):
    """A camera; the value is half the side of the square that it sees, in workspace units."""

    BASE = 1.12
    WRIST = 0.42


def render(layout: Layout, position: Tensor, view: View, size: int = IMAGE_SIZE) -> Tensor:
    """Pictures of a camera.

    Args:
        layout: discs of B episodes.
        position: pointer, float32 [B, 2], on the layout's device.
        view: BASE sees the whole workspace, WRIST follows the pointer.
        size: pixels per side.

    Returns:
        RGB, float32 [B, 3, size, size] in [0, 1], first row at the top.
    """
    centre = position if view is View.WRIST else torch.zeros_like(position)
    steps = (torch.arange(size, device=position.device) + 0.5) * (2 / size) - 1
    x = (centre[:, 0, None, None, None] + view.value * steps).expand(-1, 1, size, size)
    y = (centre[:, 1, None, None, None] - view.value * steps[:, None]).expand(-1, 1, size, size)
    canvas = _Canvas(x, y, pixel=2 * view.value / size)
    canvas.draw_mat()
    paints = torch.tensor(list(COLOURS.values()), device=position.device)[layout.colours]
    for index in range(layout.discs.shape[1]):
        canvas.draw_disc(layout.discs[:, index], paints[:, index])
    canvas.draw_pointer(position)
    return canvas.image


def to_uint8(image: Tensor) -> Tensor:
    """Round an image in [0, 1] to bytes."""
    return image.mul(255).round().to(torch.uint8)


class _Canvas:
    """Pictures in the making: [B, 3, H, W], with the world coordinates x, y [B, 1, H, W]."""

    def __init__(self, x: Tensor, y: Tensor, pixel: float) -> None:
        self.x, self.y, self.pixel = x, y, pixel
        table = torch.tensor(_TABLE, device=x.device).view(1, 3, 1, 1)
        self.image = table.expand(x.shape[0], 3, *x.shape[2:])

    def paint(
        self,
        distance: Tensor,
        colour: Tensor | tuple[float, float, float],
        *,
        soft: float = 0.0,
        opacity: float = 1.0,
    ) -> None:
        """Lay a colour ([B, 3] or one triple) over the inside of a distance field [B, 1, H, W]."""
        width = self.pixel + soft
        coverage = (0.5 - distance / width).clamp(0, 1) * opacity
        if isinstance(colour, tuple):
            colour = torch.tensor([colour], device=distance.device)
        self.image = torch.lerp(self.image, colour[..., None, None], coverage)

    def distance_to(self, point: Tensor) -> Tensor:
        """Distance of every pixel to a point [B, 2]: [B, 1, H, W]."""
        dx = self.x - point[:, 0, None, None, None]
        dy = self.y - point[:, 1, None, None, None]
        return torch.hypot(dx, dy)

    def draw_mat(self) -> None:
        """The workspace: a light mat with a fine grid on the table."""
        rounding = 0.06
        reach = WORKSPACE + 0.04 - rounding
        qx, qy = self.x.abs() - reach, self.y.abs() - reach
        mat = torch.hypot(qx.clamp_min(0), qy.clamp_min(0)) - rounding
        self.paint(mat + 0.02, _SHADOW, soft=0.08, opacity=0.5)
        self.paint(mat, _MAT)
        to_line = torch.minimum(_to_grid(self.x), _to_grid(self.y)) - 0.006
        self.paint(torch.maximum(to_line, mat), _GRID)

    def draw_disc(self, centre: Tensor, colour: Tensor) -> None:
        """A coloured disc [B, 2], [B, 3] with a shadow, a darker rim and a highlight."""
        light = centre.new_tensor(_LIGHT)
        distance = self.distance_to(centre) - DISC_RADIUS
        shadow = self.distance_to(centre - 0.6 * light) - DISC_RADIUS
        self.paint(shadow, _SHADOW, soft=0.09, opacity=0.4)
        self.paint(distance, colour * 0.72)
        self.paint(distance + 0.018, colour)
        self.paint(self.distance_to(centre + 0.9 * light) - 0.03, _WHITE, soft=0.13, opacity=0.3)

    def draw_pointer(self, centre: Tensor) -> None:
        """The pointer [B, 2]: a ring with a dot and four ticks, outlined in white."""
        dx = (self.x - centre[:, 0, None, None, None]).abs()
        dy = (self.y - centre[:, 1, None, None, None]).abs()
        away = torch.hypot(dx, dy)
        along, across = torch.maximum(dx, dy), torch.minimum(dx, dy)
        ticks = torch.maximum((along - 0.09).abs() - 0.025, across - 0.013)
        shape = torch.minimum((away - 0.06).abs() - 0.013, ticks)
        shape = torch.minimum(shape, away - 0.018)
        self.paint(away - 0.07, _SHADOW, soft=0.1, opacity=0.25)
        self.paint(shape - 0.016, _WHITE)
        self.paint(shape, _INK)


def _to_grid(coordinate: Tensor) -> Tensor:
    """Distance to the nearest multiple of the grid's pitch."""
    return (coordinate - (coordinate / _GRID_PITCH).round() * _GRID_PITCH).abs()
