"""Numbers of the bf16 products on a Hopper GPU, against FP32."""

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")

sys.path.insert(0, str(Path(__file__).parent))

import hopper_steps as steps

from phyai.triton import gated_product as gated
from phyai.triton import hopper_gemm as gemm

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
ODD_ROWS = (1, 127, 255, 257, 2049)


@pytest.fixture
def hopper():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


def poison(*shape):
    """Fills with NaN what the next tensor of this size is likely to be made of."""
    torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize("kind", gated.KINDS)
@pytest.mark.parametrize(
    ("rows", "hidden", "depth"),
    [
        *((rows, 256, 192) for rows in ODD_ROWS),
        *((968, 16384, 2048), (6186, 1536, 4096), (300, 128, 64)),
    ],
)
def test_gated_products(kind, rows, hidden, depth):
    x, weight = steps.operands(rows, 2 * hidden, depth, "cuda")
    poison(rows, hidden)
    found = gated.gated_product(x, weight, kind)
    steps.assert_near(found, steps.gated_reference(x, weight, kind))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "depth"),
    [
        *((rows, 144, 200) for rows in ODD_ROWS),
        *((768, 1152, 1152), (768, 1152, 4304), (968, 2560, 2048), (300, 16, 8)),
    ],
)
def test_plain_products(rows, columns, depth, has_bias):
    x, weight = steps.operands(rows, columns, depth, "cuda")
    bias = torch.randn(columns, device="cuda").bfloat16() if has_bias else None
    wanted = x.float() @ weight.float().T + (0 if bias is None else bias.float())
    chosen = gemm.select_plan(rows, columns, depth, 132)
    plans = [gemm.Plan(64), gemm.Plan(128, 2), gemm.Plan(256, 3)]
    for plan in [chosen, *(plan for plan in plans if plan.splits * 64 <= depth)]:
        out = torch.full((rows, columns), torch.nan, dtype=torch.bfloat16, device="cuda")
        gemm._launch(x, weight, bias, out, plan, 132)
        steps.assert_near(out, wanted)
    poison(rows, columns)
    steps.assert_near(gemm.hopper_gemm(x, weight, bias), wanted)


def test_views_and_huge_values():
    x, weight = steps.operands(513, 768, 256, "cuda", scale=300.0)
    wide = torch.full((513, 256 + 64), torch.nan, dtype=torch.bfloat16, device="cuda")
    wide[:, 16 : 16 + 256] = x
    views = (wide[:, 16 : 16 + 256], x.view(27, 19, 256), x.T.contiguous().T)
    gates, plain = steps.gated_reference(x, weight, "silu"), x.float() @ weight.float().T
    for view in views:
        found = gated.gated_product(view, weight, "silu")
        assert found.shape == (*view.shape[:-1], 384)
        steps.assert_near(found.view(513, 384), gates)
        steps.assert_near(gemm.hopper_gemm(view, weight, None).view(513, 768), plain)


def test_captures_repeat_eager_calls_bit_for_bit():
    x, weight = steps.operands(768, 1280, 4304 // 64 * 64, "cuda")
    bias = torch.randn(1280, device="cuda").bfloat16()

    def both():
        return gated.gated_product(x, weight, "gelu_tanh"), gemm.hopper_gemm(x, weight, bias)

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = both()
    x.mul_(0.5)
    for _ in range(3):
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(held, both(), strict=True))
