import subprocess
import sys
import textwrap


def run(code):
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_decoding_needs_pytorch_alone():
    run(
        """
        import sys
        import torch

        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in ("torchao", "triton", "gguf", "numpy"):
                    raise AssertionError(f"decoding asked for {name}")

        sys.meta_path.insert(0, Block())
        from piper_kernels.gguf import GGUFQuantizationType, dequantize, packed_row_size

        for kind in GGUFQuantizationType:
            packed = torch.zeros(2, packed_row_size(256, kind), dtype=torch.uint8)
            assert dequantize(packed, kind).shape == (2, 256)
        """
    )


def test_conversion_loads_no_linear_and_works_without_triton():
    run(
        """
        import sys
        import torch
        from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
        from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor

        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.startswith("piper_kernels.linear"):
                    raise AssertionError(f"a weight imported {name}")
                if name == "triton":
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, Block())
        for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
            del sys.modules[name]

        packed = torch.zeros(2, 68, dtype=torch.uint8)
        for cls in (ConvRotInt8Tensor, ConvRotNVFP4Tensor):
            weight = cls.from_gguf(packed, quant_type=8, group_size=64, allow_cpu=True)
            weight.copy_from_gguf_(packed, quant_type=8, allow_cpu=True)
            try:
                cls.from_gguf(packed, quant_type=8, group_size=64)
            except ValueError as error:
                assert "requires a supported Triton accelerator" in str(error)
            else:
                raise AssertionError("converted without being asked to")
        """
    )
