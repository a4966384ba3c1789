"""What the modules of the wheel may import: no operator for weights, no triton, no torchao."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import piper_kernels

SOURCE = Path(piper_kernels.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in SOURCE.rglob("*.py")
    if path.name != "__main__.py"
)

# Device code: the only modules that may need triton when they are imported.
DEVICE_CODE = re.compile(
    r"triton$|_triton_backend$|_kernels(\.\w+)?$|\._launch(_rows)?$|\.fusions\.\w+\._hopper(_\w+)?$"
    r"|\._nvidia\.hopper(_epilogue|_preparation|_rotation|(_\w+)?_kernel|_decode|_layouts)?$"
    r"|\.nvfp4\._(tiles|native|operands|product)$"
    r"|piper_kernels\._triton\.(?!runtime$|targets$|row_chunks$)\w+$"
    r"|piper_kernels\.attention\._preparation\.\w+$"
)
# What a user without torchao has: no weight class, no operator that consumes one.
WITHOUT_TORCHAO = re.compile(
    r"piper_kernels(\.(_autocast|_input_activations|weights|weights\.convrot"
    r"|weights\.convrot\._rotation|linear|linear\.nvfp4"
    r"|(gguf|stochastic_quantization|_triton)(\..+)?))?$"
)

IMPORT_WITHOUT = """
    import importlib
    import sys
    import torch

    absent, *modules = sys.argv[1:]

    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == absent:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in [name for name in sys.modules if name.partition(".")[0] == absent]:
        del sys.modules[name]
    sys.meta_path.insert(0, Absent())
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            assert error.name.partition(".")[0] == absent, (module, error)
            print(module)
"""


def run(code, *arguments):
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_only_device_code_needs_triton():
    """Every other module imports without it, the weight classes and operators too."""
    refused = run(IMPORT_WITHOUT, "triton", *MODULES)
    assert [name for name in refused if not DEVICE_CODE.search(name)] == []


def test_what_imports_without_torchao():
    portable = [name for name in MODULES if WITHOUT_TORCHAO.match(name)]
    assert len(portable) >= 20
    assert run(IMPORT_WITHOUT, "torchao", *portable) == []


@pytest.mark.parametrize("kind", ["ConvRotInt8", "NVFP4", "ConvRotNVFP4"])
def test_no_work_on_weights_loads_an_operator(kind):
    run(
        """
        import sys

        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name == "piper_kernels.linear" or name.startswith("piper_kernels.linear."):
                    raise AssertionError(f"a weight module imported {name}")

        sys.meta_path.insert(0, Refuse())

        import copy
        import io
        import tempfile
        from pathlib import Path

        import torch
        from piper_kernels.gguf import GGUFQuantizationType
        from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
        from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
        from piper_kernels.weights.io import load_quantized, save_quantized
        from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor
        from piper_kernels.weights.sharding import shard_quantized_weight
        from piper_kernels.weights.validate import validate_state_dict

        dense = torch.randn(8, 64)
        packed = torch.zeros(8, 68, dtype=torch.uint8)
        gguf = {"quant_type": GGUFQuantizationType.Q8_0, "allow_cpu": True}
        if sys.argv[1] == "ConvRotInt8":
            weight = ConvRotInt8Tensor.from_hp(dense, group_size=16)
            ConvRotInt8Tensor.from_quantized(weight.qdata, weight.scale, group_size=16)
            ConvRotInt8Tensor.from_gguf(packed, group_size=16, **gguf).copy_from_gguf_(
                packed, **gguf
            )
        elif sys.argv[1] == "NVFP4":
            weight = PiperNVFP4Tensor.from_hp(dense, compute_per_tensor_scale=True)
            PiperNVFP4Tensor.from_torchao(weight).get_hp_scales()
        else:
            weight = ConvRotNVFP4Tensor.from_hp(dense, group_size=16, is_swizzled_scales=True)
            ConvRotNVFP4Tensor.from_torchao(weight, group_size=16)
            ConvRotNVFP4Tensor.from_gguf(packed, group_size=16, **gguf).copy_from_gguf_(
                packed, **gguf
            )
        weight.dequantize(), weight.clone(), weight.half(), weight.float(), weight.to("meta")
        weight.t().dequantize(), weight.view(8, 64), weight.detach(), copy.deepcopy(weight)
        weight.clone().copy_(weight)
        shard_quantized_weight(weight, dim=1, start=16, length=32).dequantize()
        weight.add_(dense, rounding_seed=1)
        weight.addmm_(torch.randn(8, 2), torch.randn(2, 64), beta=0.5)
        torch.save({"weight": weight}, io.BytesIO())
        validate_state_dict({"weight": weight})
        with tempfile.TemporaryDirectory() as folder:
            save_quantized({"layer.weight": weight}, Path(folder) / "w.safetensors")
            load_quantized(Path(folder) / "w.safetensors")["layer.weight"].dequantize()
        assert not any(name.startswith("piper_kernels.linear") for name in sys.modules)
        """,
        kind,
    )


def test_a_product_does_load_an_operator():
    """The hook of the test above would notice: the lazy import is there."""
    run(
        """
        import sys
        import torch
        from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

        weight = ConvRotInt8Tensor.from_hp(torch.randn(4, 16), group_size=16)
        assert "piper_kernels.linear" not in sys.modules
        with torch.no_grad():
            torch.nn.functional.linear(torch.randn(2, 16), weight)
        assert "piper_kernels.linear" in sys.modules
        """
    )
