from pathlib import Path

import pytest
import torch
from process_state import no_synchronization

pytest.importorskip("triton", reason="Triton is not installed")

CHECKS = Path(__file__).with_name("preparation_checks.py")


def test_numerics_in_the_interpreter(run_kernel_checks):
    run_kernel_checks(CHECKS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnTheGpu:
    def test_numerics(self, run_kernel_checks):
        run_kernel_checks(CHECKS, "cuda")

    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_a_replay_equals_eager_and_nothing_synchronizes(self, head_dim):
        from piper_kernels.attention._preparation import dense, routes, sparse
        from piper_kernels.attention.sparse_piper_attention._budget import route_layout
        from piper_kernels.attention.sparse_piper_attention._routing import RoutingMode

        layout = route_layout([300_000, 600_000, 500_000, 1_000_000], 8)

        def prepare(query, key, value):
            piper = dense.prepare_piper(query, key, value, scale=0.1, is_causal=False)
            rows = [x.transpose(1, 2) for x in (query, key, value)]
            mode = RoutingMode.MINMAX
            operands, summaries = sparse.prepare_sparse(*rows, scale=0.1, mode=mode)
            table = routes.route_table(layout, query.device)
            selected = routes.select_routes(summaries, mode, layout, 9, table)
            kv = piper.key_value
            return [
                *(piper.query_codes, piper.query_scale, selected.view(torch.int16)),
                *(kv.key_codes, kv.key_scale, kv.value_codes, kv.value_sum, kv.value_mean),
                *(operands.query, operands.key, operands.value, operands.value_multiplier),
            ]

        inputs = [torch.randn(1, 4, 513, head_dim, device="cuda").bfloat16() for _ in range(3)]
        eager = prepare(*inputs)
        with no_synchronization():
            prepare(*inputs)
        live = [torch.zeros_like(x) for x in inputs]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = prepare(*live)
        for destination, source in zip(live, inputs, strict=True):
            destination.copy_(source)
        graph.replay()
        for ours, theirs in zip(captured, eager, strict=True):
            assert torch.equal(ours, theirs)
