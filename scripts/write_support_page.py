"""Write the tables of docs/support.md that follow from the code.

    python scripts/write_support_page.py

One table says which libraries have a kernel of the engine for an operation on a GPU, from the
conditions of the catalog. The other one says how weights of a policy are stored there.
"""

from pathlib import Path

from phyai.dispatch import load_policy
from phyai.dispatch.catalog import Catalog, build_catalog
from phyai.dispatch.facts import Facts
from phyai.dispatch.opspec import Impl
from phyai.dispatch.predicate import Const
from phyai_quant.materialize import materialize
from phyai_quant.scheme import QuantConfigError, QuantScheme

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "support.md"
POLICIES = ROOT / "examples" / "pi05" / "kernel_policies"
TARGETS = {
    "CPU": ("cpu", None),
    "sm_80": ("nvidia", "sm80"),
    "sm_89": ("nvidia", "sm89"),
    "sm_90": ("nvidia", "sm90"),
    "sm_100": ("nvidia", "sm100"),
    "sm_120": ("nvidia", "sm120"),
    "gfx1200, gfx1201": ("amd", "gfx1200"),
}
GPUS = {"no NVIDIA GPU": None} | {name: int(name[3:]) for name in TARGETS if name[:2] == "sm"}


def runs_there(impl: Impl, vendor: str, arch: str | None) -> bool:
    """Return whether an implementation's condition can hold on a device."""
    left = impl.when.restrict(Facts({"device.vendor": vendor, "device.arch": arch}))
    return not isinstance(left, Const) or left.value


def cell(catalog: Catalog, op: str, vendor: str, arch: str | None) -> str:
    """Return the libraries with a kernel for an operation, in the order in which they are tried."""
    impls = [impl for impl in catalog.impls(op) if runs_there(impl, vendor, arch)]
    fast = dict.fromkeys(impl.kernel_id.partition(".")[0] for impl in impls if not impl.reference)
    return ", ".join(fast) or "reference"


def row(*cells: str) -> str:
    """Return one line of a table."""
    return f"| {' | '.join(cells)} |"


def engine_table() -> str:
    """Return operations by target: the libraries that have kernels for them."""
    catalog = build_catalog()
    lines = [row("operation", *TARGETS), row(*["---"] * (len(TARGETS) + 1))]
    lines += [
        row(f"`{op}`", *(cell(catalog, op, *place) for place in TARGETS.values()))
        for op in catalog.ops()
    ]
    return "\n".join(lines)


def scheme_of(policy: Path) -> QuantScheme | None:
    """Return the scheme that a policy gives a layer of the language model."""
    plan = load_policy(policy).quant_plan
    name = "paligemma_with_expert.paligemma.model.language_model.layers.3.mlp.down_proj"
    return plan.resolve(name) if plan else None


def stored(scheme: QuantScheme, sm: int | None) -> str:
    """Return how a device stores a weight, or a dash where loading stops with the reason."""
    try:
        signature = materialize(scheme, sm).physical_signature
    except QuantConfigError:
        return "–"
    return f"`{signature.layout or signature.format}`"


def weight_table() -> str:
    """Return the shipped policies by GPU: the layout of a quantized weight in memory."""
    lines = [row("policy", *GPUS), row(*["---"] * (len(GPUS) + 1))]
    for policy in sorted(POLICIES.glob("*.yaml")):
        scheme = scheme_of(policy)
        if scheme is not None:
            cells = (stored(scheme, sm) for sm in GPUS.values())
            lines.append(row(f"`{policy.stem}`", *cells))
    return "\n".join(lines)


def page(text: str) -> str:
    """Return the page with its tables written anew."""
    for name, table in (("engine", engine_table()), ("weights", weight_table())):
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        text = f"{before}{mark}{table}\n{end}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
