"""Numbers of the persistent decoder kernel on a Hopper GPU, where its programs wait for others."""

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")

sys.path.insert(0, str(Path(__file__).parent))

import persistent_operands as operands

from phyai.kernels import decoder_persistent
from phyai.kernels.decoder_fused import run_fused
from phyai.triton import persistent_decoder as launcher

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
STEP = 6e-3


@pytest.fixture
def hopper():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


def run(case, constants, function=decoder_persistent.run_persistent):
    """Returns what a row makes of a case: residual, keys and values."""
    residual, _, _ = function(case.body, case.x, case.place, case.steps, case.final, constants)
    return residual, *case.forget()


@pytest.mark.parametrize("sizes", [operands.SMALL, operands.FULL], ids=["small", "full"])
@pytest.mark.parametrize(
    "groups",
    [
        [(50, 968)],
        [(64, 1)],
        [(1, 0)],
        [(63, 1500)],
        [(9, 0), (1, 130), (3, 64), (50, 700)],
        [(1, 3000), (50, 3000)],  # programs go from tiles without rows to those with some
    ],
    ids=str,
)
@torch.inference_mode()
def test_equals_the_layers(sizes, groups):
    case = operands.Case(sizes, groups, "cuda")
    expected = case.one_by_one()
    fused = run(case, {}, run_fused)
    constants = {}
    for _ in range(2):
        found = run(case, constants)
        for ours, theirs, exact in zip(found, fused, expected, strict=True):
            assert operands.error(ours, exact) < 2 * STEP
            assert operands.error(ours, theirs) < 2 * STEP


@torch.inference_mode()
def test_does_not_depend_on_who_is_first():
    case = operands.Case(operands.FULL, [(50, 968)], "cuda")
    constants = {}
    first = run(case, constants)
    for _ in range(200):
        assert all(map(torch.equal, run(case, constants), first))


@torch.inference_mode()
def test_one_launch_equals_a_launch_for_each_phase():
    case = operands.Case(operands.FULL, [(50, 968)], "cuda")
    layers = decoder_persistent._layers(case.body, case.steps, case.final)
    residuals = [
        launcher.run_layers(
            layers, case.x, case.plan, case.cache.keys, case.cache.values,
            rotation=case.place.angles(), first_slot=case.first_slot, phases=phases,
        )
        for phases in (None, range(6 * operands.FULL.layers))
    ]  # fmt: skip
    assert torch.equal(*residuals)


@torch.inference_mode()
def test_recorded_and_on_two_streams():
    case = operands.Case(operands.FULL, [(50, 968)], "cuda")
    constants = {}
    expected = run(case, constants)[0]
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = decoder_persistent.run_persistent(
                case.body, case.x, case.place, case.steps, case.final, constants
            )[0]
        graphs.append((graph, found, torch.cuda.Stream()))
    # Each wants all multiprocessors at once; neither may wait for one that the other holds.
    for _ in range(20):
        for graph, _, stream in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for _, found, _ in graphs:
        assert torch.equal(found, expected)
