import hashlib

import pytest
import torch
from attention_oracle import rotated

from piper_kernels.attention._signed_hadamard import SIGN_WORDS, hadamard_signs, rotate


def test_the_signs_are_the_hash_of_their_name():
    digest = hashlib.sha256(b"piper-kernels/signed-hadamard/v1").digest()
    words = tuple(int.from_bytes(digest[i : i + 4], "big") for i in range(0, 16, 4))
    assert words == SIGN_WORDS


@pytest.mark.parametrize("head_dim", [64, 128])
def test_rotation_is_the_signed_matrix_and_keeps_products(head_dim):
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(2, 5, head_dim, generator=generator) for _ in range(2))
    torch.testing.assert_close(rotate(x).double(), rotated(x.double()), atol=2e-6, rtol=0)
    torch.testing.assert_close(rotate(x) @ rotate(y).mT, x @ y.mT, atol=1e-5, rtol=1e-5)
    assert set(hadamard_signs(head_dim, x.device).tolist()) == {-1.0, 1.0}


@pytest.mark.parametrize("head_dim", [32, 80, 256])
def test_other_widths_are_refused(head_dim):
    with pytest.raises(ValueError, match=f"64 or 128, got {head_dim}"):
        rotate(torch.zeros(2, head_dim))
