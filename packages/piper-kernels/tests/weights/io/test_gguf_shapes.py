import pytest

from piper_kernels.weights.io import WeightFileError, original_gguf_shape


def test_original_shape_is_honoured():
    metadata = {"comfy.gguf.orig_shape.w": [6144, 64], "general.name": "x"}
    assert original_gguf_shape("w", [256, 1536], metadata) == (6144, 64)
    assert original_gguf_shape("other", [256, 1536], metadata) == (256, 1536)


@pytest.mark.parametrize("original", [[6144, 63], [-6144, -64], []])
def test_another_element_count_is_an_error(original):
    with pytest.raises(WeightFileError, match=r"w: comfy\.gguf\.orig_shape\.w"):
        original_gguf_shape("w", [256, 1536], {"comfy.gguf.orig_shape.w": original})
