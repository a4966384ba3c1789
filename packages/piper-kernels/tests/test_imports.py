import subprocess
import sys
import textwrap


def run(code):
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_base_import_asks_for_neither_torchao_nor_triton():
    run(
        """
        import sys
        import torch

        asked = []

        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in ("torchao", "triton"):
                    asked.append(name)
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, Block())
        import piper_kernels, piper_kernels.linear, piper_kernels.weights.convrot
        import piper_kernels.stochastic_quantization as rounding

        assert not asked, asked
        value = torch.full((4,), 0.5)
        codes = rounding.stochastic_round_to_int(
            value, seed=1, quant_min=-8, quant_max=7, deterministic=value.round()
        )
        assert set(codes.tolist()) <= {0, 1}
        assert not {"torchao", "triton"} & {name.partition(".")[0] for name in sys.modules}
        """
    )


def test_weights_never_load_linear():
    run(
        """
        import sys

        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.startswith("piper_kernels.linear"):
                    raise AssertionError(f"a weight imported {name}")

        sys.meta_path.insert(0, Block())

        import copy
        import torch
        from piper_kernels.weights.convrot import SUPPORTED_GROUP_SIZES
        from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

        weight = ConvRotInt8Tensor.from_hp(torch.randn(4, 32), group_size=16)
        weight.dequantize(), weight.clone(), weight.float(), weight.t(), copy.deepcopy(weight)
        weight.add_(torch.randn(4, 32), rounding_seed=1)
        weight.addmm_(torch.randn(4, 1), torch.randn(1, 32))
        ConvRotInt8Tensor.from_quantized(weight.qdata, weight.scale, group_size=16)
        assert not any(name.startswith("piper_kernels.linear") for name in sys.modules)
        """
    )


def test_public_names_and_no_tensors_under_linear():
    run(
        """
        import importlib
        import piper_kernels.linear.convrot as linear
        import piper_kernels.linear.convrot.int8 as linear_int8
        import piper_kernels.stochastic_quantization as rounding
        import piper_kernels.weights.convrot as convrot
        import piper_kernels.weights.convrot.int8 as int8

        assert linear.__all__ == ["convrot_int8_compile_options", "convrot_int8_linear"]
        assert rounding.__all__ == [
            "signed_seed", "stochastic_codebook_indices", "stochastic_round_to_int"
        ]
        assert convrot.__all__ == ["SUPPORTED_GROUP_SIZES"]
        assert int8.__all__ == ["ConvRotInt8Tensor"]
        for package in (linear, linear_int8):
            assert not hasattr(package, "ConvRotInt8Tensor")
            try:
                importlib.import_module(f"{package.__name__}.tensor")
            except ModuleNotFoundError:
                continue
            raise AssertionError(f"{package.__name__} has a tensor module")
        """
    )
