"""How FlashInfer's products of quantized weights are called, with a stand-in for the library."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from phyai.dispatch import KernelQuery, Selector


@pytest.mark.parametrize("stored_input_scale", [None, 0.05])
@pytest.mark.parametrize("levels", [[0.3], [0.3, 0.75]])
def test_nvfp4_gemm_multiplies_by_the_global_scale_of_each_leg(
    monkeypatch, row, strided, relative_error, stored_input_scale, levels
):
    def nvfp4_quantize(rows, global_scale, *, sfLayout):
        assert sfLayout == "tiles"
        assert global_scale.shape == (1,)
        return rows * global_scale, "scale of the input"

    def mm_fp4(a, b, a_scale, b_scale, *, alpha, out_dtype):
        assert a_scale == "scale of the input"
        return (a @ b * b_scale * alpha).to(out_dtype)

    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    for name, contents in {
        "gemm": {"mm_fp4": mm_fp4},
        "quantization": {},
        "quantization.fp4_quantization": {"nvfp4_quantize": nvfp4_quantize},
        "tllm_enums": {"SfLayout": SimpleNamespace(layout_128x4="tiles")},
    }.items():
        module = ModuleType(f"flashinfer.{name}")
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    widths = (6,) if len(levels) == 1 else (4, 2)
    layer = SimpleNamespace(
        weight=torch.randn(6, 16),
        weight_scale=torch.tensor([[2.0]]),
        weight_global_scale=torch.tensor(levels),
        input_scale=None if stored_input_scale is None else torch.tensor([stored_input_scale]),
        logical_widths=widths,
    )
    x, bias = strided(2, 3, 16), torch.randn(6)
    out = row("flashinfer.gemm.nvfp4_128x4")(layer, x, bias)
    scale = torch.tensor(levels).repeat_interleave(torch.tensor(widths))
    assert relative_error(out, x @ (2 * layer.weight * scale[:, None]).T + bias) < 1e-6


@pytest.mark.parametrize(
    ("quant", "kernel"),
    [
        ({"format": "nvfp4", "layout": "128x4", "block_shape": (1, 16)}, "nvfp4_128x4"),
        ({"format": "fp8_e4m3", "granularity": "block", "block_shape": (128, 128)}, "fp8_block"),
    ],
)
def test_quantized_rows_need_a_format_that_quantizes_its_input(quant, kernel):
    def refusal(**fields):
        query = KernelQuery.build(
            "gemm",
            device="nvidia:sm100",
            dtype={"input": "bf16", "output": "bf16"},
            quant={**quant, "fields": fields},
            dims={"M": 3, "N": 128, "K": 256},
        )
        rows = {row.kernel_id: row for row in Selector(device="cpu").explain(query).candidates}
        return rows[f"flashinfer.gemm.{kernel}"].reason

    assert "quant.fields.activation" in refusal(activation="a16")
    dtype = kernel[:3].replace("nvf", "nvfp4").replace("fp8", "fp8_e4m3")
    granted = refusal(activation=dtype, input_granularity="block", input_scale="dynamic")
    assert "quant" not in granted
