import pytest
import torch

from piper_kernels._triton import launching
from piper_kernels._triton.launching import Launcher, are_aligned


class Kernel:
    """Counts look-ups and launches like a kernel under ``triton.jit``."""

    def __init__(self, compiles=True):
        self.lookups, self.launches, self.compiles = [], [], compiles

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.lookups.append((grid, arguments, options))
            return Compiled(self.launches) if self.compiles else None

        return run


class Compiled:
    def __init__(self, launches):
        self.launches = launches

    def __getitem__(self, grid):
        return lambda *arguments: self.launches.append((grid, arguments))


def test_a_key_is_looked_up_once():
    kernel = Kernel()
    launch = Launcher(kernel)
    for size in (3, 4):
        launch(size, ("x", size), {"num_warps": 2}, ("key",))
    assert kernel.lookups == [((3, 1, 1), ("x", 3), {"num_warps": 2})]
    assert kernel.launches == [((4, 1, 1), ("x", 4))]
    launch(5, ("y", 5), {"num_warps": 4}, ("other key",))
    assert len(kernel.lookups) == 2


def test_no_key_is_looked_up_always():
    kernel = Kernel()
    for _ in range(2):
        Launcher(kernel)(1, (), {}, None)
    assert (len(kernel.lookups), kernel.launches) == (2, [])


def test_interpreted_kernels_compile_to_nothing():
    kernel = Kernel(compiles=False)
    launch = Launcher(kernel)
    for _ in range(2):
        launch(1, (), {}, ("key",))
    assert len(kernel.lookups) == 2


def test_keys_are_bounded(monkeypatch):
    monkeypatch.setattr(launching, "_LIMIT", 3)
    launch = Launcher(Kernel())
    for key in range(10):
        launch(1, (), {}, key)
        assert len(launch._compiled) <= 3


@pytest.mark.parametrize("offset", [0, 1, 4, 8, 16])
def test_alignment(offset):
    storage = torch.zeros(256, dtype=torch.uint8)
    storage = storage[-storage.data_ptr() % 16 :]
    assert are_aligned(storage)
    assert are_aligned(storage, storage[offset:]) is (offset % 16 == 0)
