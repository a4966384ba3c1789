import torch

from phyai.models.pi05.prefix import pack_rows, plan_prefix
from phyai.processing.inputs import ModelInputs

PATCHES = 2


def inputs(image_mask, token_mask):
    images, tokens = torch.tensor(image_mask), torch.tensor(token_mask)
    return ModelInputs(
        images=torch.zeros(*images.shape, 3, 4, 4),
        image_mask=images,
        tokens=torch.zeros(tokens.shape, dtype=torch.int64),
        token_mask=tokens,
        state=None,
        prompts=("",) * len(tokens),
    )


BATCH = inputs(
    [[True, False, True], [True, True, True]], [[True, True, False], [True, False, False]]
)


def test_dropped_and_packed():
    layout = plan_prefix(BATCH, PATCHES, drop_absent=True, pack_prompt=True)
    assert layout.lengths == (2 * PATCHES + 2, 3 * PATCHES + 1)
    assert layout.views == ((0, 0), (0, 2), (1, 0), (1, 1), (1, 2))
    assert layout.positions.tolist() == [*range(6), *range(7)]
    assert torch.cat(layout.visible).tolist() == list(range(13))
    assert layout.visible_counts == (6, 7)


def test_masked_tokens_are_computed_but_take_no_position():
    layout = plan_prefix(BATCH, PATCHES, drop_absent=False, pack_prompt=False)
    assert layout.lengths == (9, 9)
    assert layout.visible[0].tolist() == [0, 1, 4, 5, 6, 7]
    assert layout.visible[1].tolist() == [9, 10, 11, 12, 13, 14, 15]
    assert layout.positions[layout.visible[0]].tolist() == list(range(6))
    assert layout.visible_counts == (6, 7)


def test_a_leading_absent_camera_does_not_make_positions_negative():
    layout = plan_prefix(
        inputs([[False, True]], [[True]]), PATCHES, drop_absent=False, pack_prompt=False
    )
    assert layout.positions.min() == 0
    assert layout.visible[0].tolist() == [2, 3, 4]


def test_rows_are_packed_view_by_view_then_prompt():
    layout = plan_prefix(BATCH, PATCHES, drop_absent=True, pack_prompt=True)
    features = torch.arange(5.0)[:, None, None].expand(5, PATCHES, 1)
    prompt = (torch.full((2, 1), -1.0), torch.full((1, 1), -2.0))
    packed = pack_rows(layout, features, prompt).flatten().tolist()
    assert packed == [0, 0, 1, 1, -1, -1, 2, 2, 3, 3, 4, 4, -2]
