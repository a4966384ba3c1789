import pytest

from piper_kernels._triton.row_chunks import MAX_FUSED_WIDTH, plan_row_chunks


@pytest.mark.parametrize(
    ("width", "count", "size"),
    [
        (16, 1, 16),
        (4096, 1, 4096),
        (4112, 3, 2048),
        (5376, 3, 2048),
        (6144, 3, 2048),
        (7168, 1, 8192),
        (8192, 1, 8192),
        (14336, 2, 8192),
        (16384, 2, 8192),
        (16400, 3, 8192),
        (49152, 3, 16384),
    ],
)
def test_least_padding(width, count, size):
    plan = plan_row_chunks(width)
    assert (plan.count, plan.size) == (count, size)


def test_wider_rows_are_read_twice():
    assert plan_row_chunks(MAX_FUSED_WIDTH) is not None
    assert plan_row_chunks(MAX_FUSED_WIDTH + 16) is None


@pytest.mark.parametrize("group_size", [16, 64, 256])
def test_every_width_is_covered_by_whole_groups(group_size):
    for width in range(group_size, MAX_FUSED_WIDTH + 1, group_size):
        plan = plan_row_chunks(width)
        assert plan.size & (plan.size - 1) == 0
        assert plan.size % group_size == 0
        assert (plan.count - 1) * plan.size < width <= plan.count * plan.size
        assert plan.rows * plan.size >= 2048
        assert 4 <= plan.num_warps <= 16
