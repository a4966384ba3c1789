"""The row of the example package, and its errors."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from phyai.dispatch import (
    KernelQuery,
    PolicyError,
    Selector,
    build_catalog,
    kernel_selector_scope,
    load_policy,
    policy_from_mapping,
)
from phyai.layers import RMSNorm

ROOT = Path(__file__).parents[1]
ROW = "example.rmsnorm"


@pytest.fixture
def installed(install_package):
    install_package(ROOT)


def query(dtype="fp32", variant="gemma", **facts):
    dtypes = {"input": dtype, "weight": "fp32"}
    attrs = {"variant": variant}
    return KernelQuery.build("rmsnorm", role="norm", dtype=dtypes, attrs=attrs, **facts)


def test_without_the_package_there_is_no_row():
    assert not build_catalog().match_ids("example.*")


def test_the_row_is_found_and_chosen(installed):
    catalog = build_catalog()
    assert catalog.match_ids("example.*") == (ROW,)
    for device in ("cpu", "nvidia:sm90"):
        explained = Selector(catalog, device=device).explain(query())
        assert explained.selected == ROW
    other = Selector(catalog, device="cpu").explain(query("fp64"))
    assert other.selected == "torch.rmsnorm"
    verdict = next(row for row in other.candidates if row.kernel_id == ROW)
    assert "dtype.input" in verdict.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", ["rms", "gemma"])
@pytest.mark.parametrize("params", [{}, {"accumulate": "fp64"}])
def test_the_kernel_agrees_with_the_reference(installed, dtype, variant, params):
    catalog = build_catalog()
    facts = catalog.entry("rmsnorm").facts(query(variant=variant))
    x = torch.randn(5, 3, 48).to(dtype)
    weight = torch.randn(48)
    actual = catalog.impl(ROW).prepare(facts, params)(x, weight, 1e-6)
    expected = catalog.impl("torch.rmsnorm").prepare(facts, {})(x, weight, 1e-6)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected)


def test_a_layer_uses_it_under_the_policy(installed):
    catalog = build_catalog()
    policy = load_policy(ROOT / "policy.yaml", catalog=catalog)
    layer = RMSNorm(32, prefix="norm")
    layer.weight.data.zero_()
    with kernel_selector_scope(Selector(catalog, policy, device="cpu")):
        out = layer(torch.full((2, 32), 3.0))
    trace = layer._site.trace()
    assert (trace.selected, trace.matched_rules) == (ROW, ("exact-norms",))
    torch.testing.assert_close(out, torch.ones(2, 32))


@pytest.mark.parametrize(
    ("params", "message"),
    [({"accumulate": "fp8"}, "accumulate is 'fp8'; allowed: fp32, fp64"), ({"sum": 1}, "sum")],
)
def test_bad_params_are_errors_of_the_policy(installed, params, message):
    catalog = build_catalog()
    rule = {"match": {"op": "rmsnorm"}, "prefer": ROW, "params": params}
    with pytest.raises(PolicyError, match=message):
        Selector(catalog, policy_from_mapping({"rules": [rule]}, catalog=catalog)).select(query())


def test_a_policy_that_names_it_needs_the_package():
    with pytest.raises(PolicyError, match=r"policy\.yaml:8: .*'example\.rmsnorm'"):
        load_policy(ROOT / "policy.yaml")


def test_importing_the_rows_imports_no_kernel_library():
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / "src")!r})
import phyai_kernels_example.rows
assert not {{"torch", "triton", "flashinfer"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_module:populate", "ModuleNotFoundError"),
        ("json:no_such_function", "AttributeError"),
        ("json:loads", "TypeError"),
    ],
)
def test_a_broken_package_is_named(tmp_path, install_package, value, message):
    project = {
        "name": "broken-kernels",
        "version": "3.1",
        "entry-points": {"phyai.kernels": {"broken": value}},
    }
    install_package(project, tmp_path)
    with pytest.raises(RuntimeError, match=rf"broken-kernels 3\.1 .*'broken = {value}'.*{message}"):
        build_catalog()
