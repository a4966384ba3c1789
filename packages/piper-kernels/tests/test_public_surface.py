"""The public surface of the wheel equals ``public_surface.json``.

A change of it is a change of the contract in ``VERSIONING.md``. After a wanted one, write the file
anew with ``PIPER_WRITE_SURFACE=1`` and say in the changelog what changed.
"""

import enum
import importlib
import importlib.util
import inspect
import json
import os
import re
from pathlib import Path

import pytest

import piper_kernels

SOURCE = Path(piper_kernels.__file__).parent
STORED = Path(__file__).with_name("public_surface.json")
TENSORS = ("ConvRotInt8Tensor", "PiperNVFP4Tensor", "ConvRotNVFP4Tensor")


def public_modules():
    """Packages without an underscore, and modules that export names or that READMEs import."""
    names, modules = [], []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        if any(part.startswith("_") and part != "__init__" for part in parts):
            continue
        if parts[-1] == "__init__":
            names.append(".".join(parts[:-1]))
        elif re.search(r"^__all__ =", path.read_text(encoding="utf-8"), re.MULTILINE):
            modules.append(".".join(parts))
    if importlib.util.find_spec("triton") is None:
        modules = [name for name in modules if not name.endswith(".triton")]
    return [*names, *modules, "piper_kernels.weights.sharding"]


def read_stored():
    stored = json.loads(STORED.read_text())
    if importlib.util.find_spec("triton") is None:
        stored = {name: found for name, found in stored.items() if not name.endswith(".triton")}
    return stored


def signature_of(value):
    """Parameters with their defaults; annotations are left to the type checker."""
    value = getattr(value, "fn", value)  # a function that Triton compiles keeps the Python one
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return None
    return [str(p.replace(annotation=inspect.Parameter.empty)) for p in parameters]


def describe(value):
    """Return what callers of a public object depend on."""
    if inspect.isclass(value) and issubclass(value, enum.Enum):
        return {member.name: str(member.value) for member in value}
    if inspect.isclass(value):
        ours = [base for base in value.__mro__ if base.__module__.startswith("piper_kernels.")]
        members = {
            name: member
            for base in reversed(ours)
            for name, member in vars(base).items()
            if not name.startswith("_") and (callable(member) or isinstance(member, classmethod))
        }
        described = {name: signature_of(getattr(value, name)) for name in sorted(members)}
        if value.__name__ in TENSORS:
            described["inner tensors"] = [
                *value.tensor_data_names, *value.optional_tensor_data_names
            ]  # fmt: skip
            described["attributes"] = [
                *value.tensor_attribute_names, *value.optional_tensor_attribute_names
            ]  # fmt: skip
            described["pickled as"] = f"{value.__module__}.{value.__qualname__}"
        return {"constructor": signature_of(value), **described}
    return signature_of(value) if callable(value) or hasattr(value, "fn") else type(value).__name__


def surface():
    """Return every public name by module."""
    result = {}
    for name in public_modules():
        module = importlib.import_module(name)
        exported = getattr(module, "__all__", None)
        if exported is None and name == "piper_kernels.weights.sharding":
            exported = ["shard_quantized_weight"]
        result[name] = {key: describe(getattr(module, key)) for key in sorted(exported or ())}
    return json.loads(json.dumps(result))


@pytest.fixture(scope="module")
def current():
    found = surface()
    if os.environ.get("PIPER_WRITE_SURFACE") == "1":
        STORED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def test_no_module_appears_or_disappears(current):
    different = current.keys() ^ json.loads(STORED.read_text()).keys()
    assert not different, f"PIPER_WRITE_SURFACE=1 writes the file anew: {sorted(different)}"


def test_the_surface_is_the_stored_one(current):
    for module, names in read_stored().items():
        assert current[module] == names, module


def test_the_documented_names_are_there(current):
    assert "ConvRotInt8Tensor" in current["piper_kernels.weights.convrot.int8"]
    assert "PiperNVFP4Tensor" in current["piper_kernels.weights.nvfp4"]
    assert "ConvRotNVFP4Tensor" in current["piper_kernels.weights.convrot.nvfp4"]
    assert "shard_quantized_weight" in current["piper_kernels.weights.sharding"]
    assert {"GGUFQuantizationType", "dequantize"} <= current["piper_kernels.gguf"].keys()
    int8 = current["piper_kernels.weights.convrot.int8"]["ConvRotInt8Tensor"]
    assert int8["pickled as"] == "piper_kernels.weights.convrot.int8.tensor.ConvRotInt8Tensor"
    assert int8["addmm_"][-1] == "rounding_seed=None"


def test_what_kernels_of_others_call_is_there(current):
    pytest.importorskip("triton")
    rounding = current["piper_kernels.stochastic_quantization.triton"]
    assert rounding.keys() == {"random_uniform", "seed_argument", "stochastic_round_to_int"}
    assert rounding["random_uniform"] == ["seed", "offsets"]


def test_exports_are_sorted_and_complete():
    for name in public_modules():
        module = importlib.import_module(name)
        exported = list(getattr(module, "__all__", ()))
        assert len(set(exported)) == len(exported), name
        assert [key for key in exported if not hasattr(module, key)] == [], name
