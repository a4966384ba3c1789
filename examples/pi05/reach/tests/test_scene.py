import pytest
import torch
from reach.instructions import COLOURS
from reach.scene import IMAGE_SIZE, View, render, to_uint8
from reach.world import DISC_RADIUS, Layout, sample_layouts
from torch.nn import functional


def single(discs: list[list[float]], colours: list[int]) -> Layout:
    zero = torch.zeros(1, dtype=torch.int64)
    return Layout(torch.tensor([discs]), torch.tensor([colours]), zero, zero, torch.zeros(1, 2))


def pixel(view: View, point: tuple[float, float], centre=(0.0, 0.0), size: int = IMAGE_SIZE):
    """Row and column of the pixel that holds a point of the workspace."""
    half = view.value
    column = (point[0] - centre[0] + half) / (2 * half) * size
    row = (half - (point[1] - centre[1])) / (2 * half) * size
    return int(row), int(column)


def test_discs_lie_where_the_layout_says():
    layout = single([[0.5, 0.6], [-0.6, 0.1], [0.1, -0.7]], [0, 2, 3])
    pointer = torch.tensor([[-0.9, -0.9]])
    image = render(layout, pointer, View.BASE)
    for disc, name in zip(layout.discs[0].tolist(), ("red", "blue", "yellow"), strict=True):
        row, column = pixel(View.BASE, tuple(disc))
        seen = image[0, :, row + 1, column - 1 + 2]
        assert (seen - torch.tensor(COLOURS[name])).abs().max() < 0.12, name


def test_wrist_camera_follows_the_pointer():
    pointer = torch.tensor([[0.3, -0.4]])
    near = single([[0.5, -0.3], [-0.9, 0.9], [0.9, 0.9]], [1, 0, 2])
    image = render(near, pointer, View.WRIST)
    row, column = pixel(View.WRIST, (0.5, -0.3), (0.3, -0.4))
    assert (image[0, :, row, column] - torch.tensor(COLOURS["green"])).abs().max() < 0.15
    centre = image[0, :, IMAGE_SIZE // 2, IMAGE_SIZE // 2]
    assert centre.max() < 0.3  # the dot of the pointer
    shift = torch.tensor([0.1, 0.2])
    moved = single((near.discs[0] + shift).tolist(), [1, 0, 2])
    again = render(moved, pointer + shift, View.WRIST)
    row, column = pixel(View.WRIST, (0.6, -0.1), (0.4, -0.2))
    assert (again[0, :, row, column] - torch.tensor(COLOURS["green"])).abs().max() < 0.15


def test_disc_covers_its_area():
    layout = single([[0.0, 0.0], [5.0, 5.0], [5.0, 5.0]], [2, 0, 0])
    image = render(layout, torch.tensor([[0.9, 0.9]]), View.BASE, 509)
    blue = image[0, 2] - image[0, 0] > 0.3
    area = blue.sum() * (2 * View.BASE.value / 509) ** 2
    assert float(area) == pytest.approx(torch.pi * DISC_RADIUS**2, rel=0.02)


@pytest.mark.parametrize("view", list(View))
def test_small_picture_is_the_average_of_a_large_one(view):
    layout = sample_layouts(5, torch.Generator().manual_seed(2))
    large = render(layout, layout.goal * 0.9, view, 8 * IMAGE_SIZE)
    small = render(layout, layout.goal * 0.9, view)
    gap = (functional.avg_pool2d(large, 8) - small).abs()
    assert gap.mean() < 0.006
    assert gap.max() < 0.35


@pytest.mark.parametrize("size", [1, 37, 84])
def test_a_batch_is_drawn_like_single_scenes(size):
    layout = sample_layouts(7, torch.Generator().manual_seed(3))
    batch = render(layout, layout.start, View.WRIST, size)
    assert batch.shape == (7, 3, size, size)
    for index in (0, 6):
        alone = Layout(*(getattr(layout, f)[index : index + 1] for f in layout.__match_args__))
        single_image = render(alone, layout.start[index : index + 1], View.WRIST, size)
        torch.testing.assert_close(single_image[0], batch[index], rtol=0, atol=1e-6)


def test_every_colour_is_told_apart():
    paints = torch.tensor(list(COLOURS.values()))
    gaps = torch.cdist(paints, paints) + 9 * torch.eye(len(paints))
    assert gaps.min() > 0.25


def test_values_are_colours_and_bytes_round():
    layout = sample_layouts(3, torch.Generator().manual_seed(4))
    image = render(layout, layout.start, View.BASE)
    assert image.min() >= 0
    assert image.max() <= 1
    assert to_uint8(torch.tensor([0.0, 0.4999 / 255, 0.5001 / 255, 1.0])).tolist() == [0, 0, 1, 255]
