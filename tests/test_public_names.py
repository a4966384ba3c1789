"""The public names of ``phyai`` and ``phyai_quant`` equal ``public_names.json``.

They are the names in ``__all__``, and those that pages and examples import: what a reader has
copied must go on working. After a wanted change, write the file anew with
``PIPER_WRITE_SURFACE=1`` and say in the changelog what changed. piper-kernels keeps its own file,
which also holds the storage of its tensors.
"""

import ast
import enum
import importlib
import inspect
import json
import os
import re
from collections import defaultdict
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STORED = Path(__file__).with_name("public_names.json")
PIPER = ROOT / "packages/piper-kernels/tests/public_surface.json"
SOURCES = {
    "phyai": ROOT / "packages/phyai-engine/src",
    "phyai_quant": ROOT / "packages/phyai-quant/src",
}
# The reaching demo trains a model of its own from parts of π0.5 that are not public.
TRAINING = ROOT / "examples/pi05/reach"


def exported():
    """Return the modules that have ``__all__``, with the names in it."""
    names = {}
    for source in SOURCES.values():
        for path in sorted(source.rglob("*.py")):
            if re.search(r"^__all__ =", path.read_text(encoding="utf-8"), re.MULTILINE):
                parts = path.relative_to(source).with_suffix("").parts
                module = ".".join(part for part in parts if part != "__init__")
                names[module] = set(importlib.import_module(module).__all__)
    return names


def code_for_readers():
    """Return the Python of pages and examples by file."""
    code = {}
    for path in (*ROOT.glob("docs/*.md"), ROOT / "README.md", *ROOT.glob("packages/*/README.md")):
        blocks = re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
        code[path] = "\n".join(blocks)
    for path in ROOT.glob("packages/*/src/**/README.md"):
        blocks = re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
        code[path] = "\n".join(blocks)
    for path in ROOT.glob("examples/**/*.py"):
        if "tests" not in path.parts and not path.is_relative_to(TRAINING):
            code[path] = path.read_text(encoding="utf-8")
    return code


def imported_by_readers():
    """Return the names that pages and examples import from the three wheels, by module."""
    names = defaultdict(set)
    for code in code_for_readers().values():
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and node.module:
                names[node.module] |= {alias.name for alias in node.names}
    packages = (*SOURCES, "piper_kernels")
    return {m: found for m, found in sorted(names.items()) if m.partition(".")[0] in packages}


def signature_of(value):
    """Parameters with their defaults; annotations are left to the type checker."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return "unknown"
    texts = [str(p.replace(annotation=inspect.Parameter.empty)) for p in parameters]
    return f"({re.sub(' at 0x[0-9a-f]+', '', ', '.join(texts))})"


def constructor_of(value):
    ours = any("__init__" in vars(base) for base in own_bases(value))
    # What Python says about its own exceptions differs by version.
    return "exception" if issubclass(value, Exception) and not ours else signature_of(value)


def own_bases(value):
    return [base for base in value.__mro__ if base.__module__.partition(".")[0] in SOURCES]


def describe(value):
    """Return what callers of a public object depend on."""
    if inspect.ismodule(value):
        return "module"
    if inspect.isclass(value) and issubclass(value, enum.Enum):
        return {member.name: str(member.value) for member in value}
    if inspect.isclass(value):
        members = {
            name
            for base in own_bases(value)
            for name, member in vars(base).items()
            if not name.startswith("_") and (inspect.isroutine(member) or name in vars(value))
        }
        described = {}
        for name in sorted(members):
            member = inspect.getattr_static(value, name)
            if isinstance(member, property | cached_property):
                described[name] = "property"
            elif inspect.isroutine(member):
                described[name] = signature_of(getattr(value, name))
        return {"constructor": constructor_of(value), **described}
    return signature_of(value) if callable(value) else type(value).__name__


@pytest.fixture(scope="module")
def current():
    names = exported()
    for module, found in imported_by_readers().items():
        if module.partition(".")[0] in SOURCES:
            names.setdefault(module, set()).update(found)
    surface = {}
    for module in sorted(names):
        loaded = importlib.import_module(module)
        surface[module] = {}
        for name in sorted(names[module]):
            if not hasattr(loaded, name):
                importlib.import_module(f"{module}.{name}")
            surface[module][name] = describe(getattr(loaded, name))
    if os.environ.get("PIPER_WRITE_SURFACE") == "1":
        STORED.write_text(json.dumps(surface, indent=1) + "\n", encoding="utf-8")
    return json.loads(json.dumps(surface))


def test_the_public_names_are_the_stored_ones(current):
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    assert list(current) == list(stored)
    for module, names in stored.items():
        assert current[module] == names, module


def test_what_readers_import_from_piper_kernels_is_public():
    """Modules with an underscore register operators that a page calls, and give no name."""
    stored = json.loads(PIPER.read_text(encoding="utf-8"))
    missing = [
        f"{module}.{name}"
        for module, names in imported_by_readers().items()
        for name in names
        if module.startswith("piper_kernels") and name not in stored.get(module, {})
    ]
    assert missing == []


# What the descriptions of kernel policies and of quantization tell users to import.
DOCUMENTED = {
    "phyai.engine": "Engine EngineArgs",
    "phyai.engine_config": "DeviceConfig EngineConfig ParallelConfig",
    "phyai.dispatch": "KernelConfig KernelQuery freeze_kernel_choices initialize_kernel_system",
    "phyai.dispatch.opspec": "Impl ParamContract Priority",
    "phyai.models.cosmos3.main_cosmos3": "Cosmos3Args",
    "phyai.models.pi05.main_pi05": "PI05Args",
    "phyai_quant": "Granularity Matcher QDType QuantPlan QuantScheme Rule TensorQuant "
    "get_active_plan load_quant_plan materialize use_quant_plan",
    "phyai_quant.importers.base": "ConfigSources",
}


@pytest.mark.parametrize("module", DOCUMENTED)
def test_documented_names_are_public(current, module):
    assert set(DOCUMENTED[module].split()) <= current[module].keys()


def test_exports_have_no_repetition():
    for module in exported():
        names = list(importlib.import_module(module).__all__)
        assert len(set(names)) == len(names), module
