import pytest
import torch

from piper_kernels._triton.runtime import as_words


@pytest.mark.parametrize("offset", [0, 1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_words_are_written_through_at_any_address(dtype, offset):
    buffer = torch.zeros(64, dtype=dtype)
    codes = buffer[offset : offset + 48].view(3, 16)
    codes.copy_(torch.arange(48).view(3, 16))
    with as_words(codes) as words:
        assert words.shape == (3, 4)
        assert words[0, 0] == 0x03020100
        words[1] = 0x04030201
    expected = torch.tensor([1, 2, 3, 4] * 4, dtype=dtype)
    assert torch.equal(codes[1], expected)
    assert codes[2].tolist() == list(range(32, 48))
    assert not buffer[:offset].any()
    assert not buffer[offset + 48 :].any()
