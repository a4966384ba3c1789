"""Names that the README and the format page mention exist."""

import importlib
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1]
PAGES = (PACKAGE / "README.md", PACKAGE.parents[1] / "docs" / "formats.md")
# On the format page that prefix is a metadata key too.
METADATA_KEYS = {"piper_kernels.weights"}


def prose(page):
    """The text of a page without its code blocks."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def dotted_names():
    pattern = r"`((?:piper_kernels\.)?(?:weights|gguf|linear|stochastic_quantization)\.[\w.]+)`"
    found = {name for page in PAGES for name in re.findall(pattern, prose(page))}
    return sorted(found - METADATA_KEYS)


def resolve(name):
    name = name if name.startswith("piper_kernels.") else f"piper_kernels.{name}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return getattr(importlib.import_module(module), attribute)


def test_the_pages_name_the_classes_and_modules():
    names = dotted_names()
    assert {"weights.convrot.int8.ConvRotInt8Tensor", "piper_kernels.weights.io"} <= set(names)


@pytest.mark.parametrize("name", dotted_names())
def test_name_imports(name):
    assert resolve(name) is not None


def test_functions_of_the_format_page():
    io = importlib.import_module("piper_kernels.weights.io")
    mentioned = set(re.findall(r"`(\w+)`", prose(PAGES[1])))
    wanted = {"load_quantized", "read_header", "original_gguf_shape", "quantize_int8"}
    assert wanted <= mentioned
    assert [name for name in sorted(wanted) if name not in io.__all__] == []
