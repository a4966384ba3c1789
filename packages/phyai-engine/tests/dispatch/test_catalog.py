import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import phyai.kernels
from phyai.dispatch.catalog import (
    OP_MODULES,
    Catalog,
    UnknownKernelError,
    UnknownOperationError,
    build_catalog,
)
from phyai.dispatch.conditions import eq, is_set
from phyai.dispatch.facts import FactKind
from phyai.dispatch.opspec import Impl, OpSpec, ParamContract

MANIFEST = Path(__file__).with_name("catalog_manifest.json")


def row(kernel_id="a.toy", op="toy", when=None, **changes):
    when = is_set("dtype.input") if when is None else when
    prepare = changes.pop("prepare", lambda facts, params: print)
    return Impl(kernel_id=kernel_id, op=op, when=when, prepare=prepare, priority=0, **changes)


@pytest.fixture
def empty():
    catalog = Catalog()
    catalog.register_op(
        OpSpec(
            name="toy",
            dims=("M",),
            dtypes=("input",),
            optional_attributes={"window": FactKind.INT},
            params=("weight",),
        )
    )
    return catalog


def test_manifest_equals_the_committed_one(catalog):
    """A changed row is a diff of the committed manifest; PHYAI_WRITE_MANIFEST=1 writes it anew."""
    if os.environ.get("PHYAI_WRITE_MANIFEST"):
        MANIFEST.write_text(json.dumps(catalog.manifest(), indent=1) + "\n")
    rows = {row["id"]: row for row in catalog.manifest()}
    committed = {row["id"]: row for row in json.loads(MANIFEST.read_text())}
    changed = sorted(i for i in rows.keys() | committed if rows.get(i) != committed.get(i))
    assert not changed, f"PHYAI_WRITE_MANIFEST=1 writes the manifest anew: {changed}"
    assert list(rows) == list(committed)


def test_version_is_stable_and_hexadecimal(catalog):
    again = build_catalog()
    assert json.dumps(again.manifest()) == json.dumps(catalog.manifest())
    assert again.version == catalog.version
    assert len(catalog.version) == 16
    int(catalog.version, 16)


def test_version_follows_registration(empty):
    empty.register(row())
    before, revision = empty.version, empty.revision
    empty.register(row("b.toy"))
    assert empty.version != before
    assert empty.revision > revision


def test_every_module_with_rows_is_asked_for_them():
    folder = Path(phyai.kernels.__file__).parent
    adding = [p.stem for p in folder.glob("*.py") if "\ndef populate(" in p.read_text()]
    assert sorted(adding) == list(OP_MODULES), "give the module a line in OP_MODULES"


def test_every_operation_has_a_reference_and_libraries_are_known(catalog):
    assert catalog.coverage_gaps() == ()
    libraries = ("cudnn", "fla", "flash_qla", "flashinfer", "humming", "piper_kernels", "triton")
    assert catalog.libraries() == libraries


def test_every_row_constrains_a_required_fact(catalog):
    for op in catalog.ops():
        for impl in catalog.impls(op):
            assert impl.when.facts_used() - catalog.entry(op).optional, impl.kernel_id


def test_rows_are_sorted_by_priority_then_id(catalog):
    keys = [(-impl.priority, impl.kernel_id) for impl in catalog.impls("gemm")]
    assert keys == sorted(keys)


def test_globs_keep_priority_order(catalog):
    ids = catalog.match_ids("FlashInfer.attention_paged*")
    assert ids[0] == "flashinfer.attention_paged"
    assert ids[1:] == tuple(sorted(ids[1:]))
    mixed = catalog.match_ids("*.gemm.*")
    assert mixed.index("humming.gemm.w4a16") < mixed.index("flashinfer.gemm.bf16")
    assert mixed.index("flashinfer.gemm.bf16") < mixed.index("torch.gemm.bf16")


def test_backends(catalog):
    assert catalog.backends("rmsnorm") == ("flashinfer", "torch", "triton")
    assert catalog.ids_for_backend("rmsnorm", "Torch") == ("torch.rmsnorm",)
    with pytest.raises(ValueError, match="no backend 'humming'; known: flashinfer, torch, triton"):
        catalog.ids_for_backend("rmsnorm", "humming")


def test_unknown_names_are_suggested(catalog):
    with pytest.raises(UnknownOperationError, match="did you mean 'attention_paged'"):
        catalog.entry("atention_paged")
    with pytest.raises(UnknownKernelError, match=r"did you mean 'torch\.rmsnorm'"):
        catalog.impl("torch.rmsnrm")
    assert isinstance(UnknownKernelError("x"), KeyError)
    assert catalog.impl("TORCH.RMSNORM").kernel_id == "torch.rmsnorm"


@pytest.mark.parametrize(
    ("impl", "error", "message"),
    [
        (row(op="toi"), UnknownOperationError, "unknown operation 'toi'"),
        (row(when=eq("shape.K", 1)), ValueError, "reads 'shape.K'"),
        (row(when=eq("device.vender", "x")), ValueError, "reads 'device.vender'"),
        (row(when=eq("attrs.window", 1)), ValueError, "only optional facts"),
        (row(params={"bias": ParamContract.any_float()}), ValueError, "no parameter of 'toy'"),
    ],
)
def test_refused_rows(empty, impl, error, message):
    with pytest.raises(error, match=message):
        empty.register(impl)


def test_duplicates_are_refused(empty):
    empty.register(row())
    with pytest.raises(ValueError, match=r"'a\.toy' is already registered"):
        empty.register(row())
    with pytest.raises(ValueError, match="'toy' is already registered"):
        empty.register_op(OpSpec(name="toy"))


def test_bad_declarations():
    with pytest.raises(ValueError, match="both required and optional"):
        OpSpec(name="x", dtypes=("input",), optional_dtypes=("input",))
    with pytest.raises(ValueError, match="lower-case"):
        OpSpec(name="Gemm")
    with pytest.raises(ValueError, match="dotted"):
        row("plain")
    with pytest.raises(ValueError, match=r"not in 0\.\.19"):
        Impl(kernel_id="a.b", op="toy", when=is_set("op"), prepare=print, priority=20)


def test_gap_is_an_error_of_building():
    with pytest.raises(ValueError, match="without a reference row: orphan"):
        build_catalog([lambda catalog: catalog.register_op(OpSpec(name="orphan"))])


def test_description_has_one_line_per_row(catalog):
    assert len(catalog.describe().splitlines()) == len(catalog.manifest())


def test_building_selecting_and_explaining_import_no_optional_library():
    code = """
import sys
import phyai.dispatch as d
assert "torch" not in sys.modules, "torch"
catalog = d.build_catalog()
selector = d.Selector(catalog, device="cpu")
d.set_kernel_selector(selector)
for op in catalog.ops():
    d.explain(op, device="nvidia:sm90", dtype="bf16")
site = d.CallSite("gemm")
site.select(device="cpu", dtype={"input": "fp32", "output": "fp32"}, quant={"format": "bf16"})
loaded = {"flashinfer", "humming", "triton"} & set(sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
