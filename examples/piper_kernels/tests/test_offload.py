import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

SCRIPT = Path(__file__).resolve().parents[1] / "offload.py"


@pytest.fixture(scope="module")
def offload():
    spec = importlib.util.spec_from_file_location("offload_example", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def make(offload, fmt, source, layers, folder, device="cpu", size=128):
    generator = torch.Generator().manual_seed(layers)
    dense = [
        torch.randn(size, size, generator=generator).mul_(size**-0.5).bfloat16()
        for _ in range(layers)
    ]
    x = torch.randn(5, size, generator=generator).bfloat16().to(device)
    with torch.no_grad():
        return (*offload.build(dense, fmt, source, device, folder), x)


def resident_output(resident, x):
    for weight in resident:
        x = functional.rms_norm(x + functional.linear(x, weight), x.shape[-1:])
    return x


@pytest.mark.parametrize("fmt", ["int8", "nvfp4"])
@pytest.mark.parametrize("source", ["pinned", "mmap", "gguf"])
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_pipeline_equals_resident_weights(offload, tmp_path, fmt, source, layers):
    pipeline, resident, x = make(offload, fmt, source, layers, tmp_path)
    inner = [t for buffer in pipeline.buffers for t in offload.inner_tensors(buffer)]
    pointers = [tensor.data_ptr() for tensor in inner]
    with torch.no_grad():
        expected = resident_output(resident, x)
        for _ in range(2):
            assert torch.equal(pipeline.run(x), expected)
    after = [t for buffer in pipeline.buffers for t in offload.inner_tensors(buffer)]
    assert all(old is new for old, new in zip(inner, after, strict=True))
    assert pointers == [tensor.data_ptr() for tensor in after]
    last = pipeline.buffers[(layers - 1) % 2]
    assert torch.equal(last.qdata, resident[-1].qdata)
    assert torch.equal(last.dequantize(), resident[-1].dequantize())


def test_q8_0_bytes_decode_to_the_weight(offload):
    from piper_kernels.gguf import GGUFQuantizationType, dequantize

    dense = torch.randn(3, 96)
    packed = offload.pack_q8_0(dense)
    assert packed.shape == (3, 3 * 34)
    decoded = dequantize(packed, GGUFQuantizationType.Q8_0)
    assert (decoded - dense).norm() < 0.01 * dense.norm()


def test_main_reports(offload, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["offload.py", "--device", "cpu", "--repeats", "1"])
    offload.main()
    out = capsys.readouterr().out
    assert "8 layers of 0.06 MiB, pinned on the host" in out
    assert "output equals resident weights; storage of both buffers unchanged" in out
    assert re.search(r"pipeline: \d+\.\d+ ms", out)
    assert "no streams on this device" in out


def test_main_refuses_a_pipeline_that_is_wrong(offload, monkeypatch):
    monkeypatch.setattr(offload.Pipeline, "_fill", lambda *_args, **_options: None)
    monkeypatch.setattr(sys, "argv", ["offload.py", "--device", "cpu", "--repeats", "1"])
    with pytest.raises(SystemExit, match="differs from weights that stay"):
        offload.main()


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["int8", "nvfp4"])
@pytest.mark.parametrize("source", ["pinned", "mmap", "gguf"])
def test_pipeline_on_a_device(offload, tmp_path, fmt, source):
    pipeline, resident, x = make(offload, fmt, source, 5, tmp_path, device="cuda", size=1024)
    with torch.no_grad():
        expected = resident_output(resident, x)
        for _ in range(3):
            assert torch.equal(pipeline.run(x), expected)
