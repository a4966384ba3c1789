"""A small catalog with one operation, so that tests state exactly the rows they need."""

import textwrap

import pytest

from phyai.dispatch import Selector, bootstrap, load_policy, set_kernel_selector
from phyai.dispatch.call import reset_verify_frozen
from phyai.dispatch.catalog import Catalog, build_catalog
from phyai.dispatch.conditions import eq, is_set
from phyai.dispatch.facts import FactKind
from phyai.dispatch.opspec import Impl, OpSpec, ParamContract
from phyai.dispatch.predicate import all_of


@pytest.fixture(scope="session")
def catalog():
    return build_catalog()


@pytest.fixture
def load(tmp_path, catalog):
    """Returns what loads the text of a policy from ``policy.yaml``."""

    def write(text):
        path = tmp_path / "policy.yaml"
        path.write_text(textwrap.dedent(text).lstrip("\n"), encoding="utf-8")
        return load_policy(path, catalog=catalog)

    return write


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch):
    for name in ("CONFIG", "PROFILE", "AUTOTUNE_CACHE", "VERIFY_FROZEN"):
        monkeypatch.delenv(f"PHYAI_KERNEL_{name}", raising=False)
    bootstrap.reset_kernel_selector()
    reset_verify_frozen()
    yield
    bootstrap.reset_kernel_selector()
    reset_verify_frozen()


class Recorder:
    """Makes `prepare` functions that return the row's id and remember being called."""

    def __init__(self):
        self.prepared = []

    def __call__(self, kernel_id, error=None):
        def execute(*args):
            return kernel_id

        def prepare(facts, params):
            self.prepared.append((kernel_id, dict(params)))
            if error is not None:
                raise error
            return execute

        return prepare


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def toy(recorder):
    """Op ``toy``: fast.toy (input bf16, not capture-safe), mid.toy, slow.toy (reference)."""
    return make_toy(recorder)


@pytest.fixture
def add_row(toy, recorder):
    """Returns what adds a row to ``toy``, preferred to all others where its condition holds."""

    def add(kernel_id="new.toy", when=eq("op", "toy"), **options):  # noqa: B008  # immutable
        prepare = recorder(kernel_id)
        toy.register(
            Impl(kernel_id=kernel_id, op="toy", when=when, prepare=prepare, priority=19, **options)
        )

    return add


@pytest.fixture
def selector(toy):
    """The selector of the process: over ``toy``, on the CPU."""
    selector = Selector(toy, device="cpu")
    set_kernel_selector(selector)
    return selector


def make_toy(recorder, errors=None):
    errors = errors or {}
    catalog = Catalog()
    catalog.register_op(
        OpSpec(
            name="toy",
            dims=("M",),
            dtypes=("input",),
            optional_dtypes=("weight",),
            attributes={"flag": FactKind.BOOL},
            optional_attributes={"window": FactKind.INT},
            params=("weight",),
        )
    )
    rows = {
        "fast.toy": (eq("dtype.input", "bf16"), 8, False, False),
        "mid.toy": (all_of(is_set("dtype.input"), eq("quant.format", None)), 4, False, True),
        "slow.toy": (is_set("dtype.input"), 0, True, True),
    }
    for kernel_id, (when, priority, reference, capture_safe) in rows.items():
        catalog.register(
            Impl(
                kernel_id=kernel_id,
                op="toy",
                when=when,
                prepare=recorder(kernel_id, errors.get(kernel_id)),
                priority=priority,
                reference=reference,
                capture_safe=capture_safe,
                params={"weight": ParamContract.any_float()},
                accepts=("size",),
            )
        )
    return catalog


@pytest.fixture
def make(recorder):
    def build(**errors):
        named = {key.replace("_", "."): error for key, error in errors.items()}
        return make_toy(recorder, named)

    return build
