"""The documentation site: every page has a place, links are followed, drawings are current."""

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parent.parent
SITE = YAML(typ="safe", pure=True).load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


DOCS = sorted((ROOT / "docs").glob("*.md"))
OPERATORS = ROOT / "packages" / "piper-kernels" / "src" / "piper_kernels"
# The sections of an operator's README, in this order; those that every one has.
SECTIONS = ["Maths", "Numeric contract", "Storage", "Behaviour", "Operators"]
SECTIONS += ["Execution", "Support", "Files"]
REQUIRED = {"Maths", "Numeric contract", "Support"}
# Pages of several operators, and of what operators share.
NO_OPERATOR = {"_compile", "attention/_preparation", "fusions", "weights"}
NO_OPERATOR |= {"specializations/minimax_h3_vae"}


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hooks, diagrams = script("docs_hooks"), script("draw_diagrams")
support = script("write_support_page")


def entries(node):
    """Return the paths of the navigation."""
    if isinstance(node, str):
        return [node]
    values = node.values() if isinstance(node, dict) else node
    return [path for value in values for path in entries(value)]


def pages():
    found = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    return {*found, *hooks.outside_pages(), *(f"reference/{name}.md" for name in hooks.SOURCES)}


def test_every_page_stands_once_in_the_navigation():
    named = entries(SITE["nav"])
    assert sorted(named) == sorted(pages())


def operator_pages():
    found = {page.parent.relative_to(OPERATORS).as_posix() for page in OPERATORS.rglob("README.md")}
    assert found >= NO_OPERATOR
    return sorted(found - NO_OPERATOR)


@pytest.mark.parametrize("operator", operator_pages())
def test_readmes_of_operators_have_the_same_sections_in_the_same_order(operator):
    text = (OPERATORS / operator / "README.md").read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^## (.*)$", prose, flags=re.MULTILINE)
    assert headings == [name for name in SECTIONS if name in headings]
    assert set(headings) >= REQUIRED
    assert len(re.findall(r"^# ", prose, flags=re.MULTILINE)) == 1


def test_what_stands_within_a_list_is_indented_as_the_site_wants_it():
    """Python-Markdown ends a list at a paragraph or block that is indented by less than four."""
    for path in [*hooks.outside_pages(), "README.md", *(f"docs/{p.name}" for p in DOCS)]:
        text = (ROOT / path).read_text(encoding="utf-8")
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
        assert re.search(r"\n\n {1,3}\S.*", prose) is None, path


def test_the_reference_lists_public_modules_only():
    modules = hooks.public_modules("piper_kernels")
    assert "piper_kernels.attention" in modules
    assert not [name for name in modules if "._" in name]
    assert "::: piper_kernels.attention\n" in hooks.reference_page("piper_kernels")


def test_the_reference_has_every_name_that_is_held_as_public():
    """Also what pages import from modules without ``__all__``, such as the engine itself."""
    offered = {}
    for package in hooks.SOURCES:
        offered |= hooks.public_names(package)
    assert {"Engine", "EngineArgs"} <= offered["phyai.engine"].keys()
    missing = {
        f"{module}.{name}"
        for module, names in hooks.public_surface().items()
        for name, described in names.items()
        if described != "module" and name not in offered.get(module, {})
    }
    assert missing == {"phyai.cli.main", "phyai_quant.cli.main"}


def test_members_of_an_enumeration_stand_behind_its_description():
    html = (
        '<h3 id="phyai.dispatch.KernelMode" class="doc doc-heading">k</h3>\n'
        '<div class="doc doc-contents ">\n<p>How a call runs.</p>\n<p>More.</p></div>'
    )
    found = hooks.on_page_content(html, None, None, None)
    members = "<code>EAGER</code> (eager), <code>CAPTURE</code> (capture)"
    assert f"runs.</p>\n<p>Members: {members}" in found
    other = html.replace("KernelMode", "Selector")
    assert hooks.on_page_content(other, None, None, None) == other


def test_a_name_that_two_modules_offer_is_documented_once():
    names = hooks.public_names("piper_kernels")
    deepest = "piper_kernels.attention.coarse"
    assert names["piper_kernels"]["coarse_attention"] == deepest
    assert names[deepest]["coarse_attention"] == deepest
    section = hooks.reference_section("piper_kernels", names["piper_kernels"])
    assert "members: false" in section
    assert f"[`coarse_attention`](#{deepest}.coarse_attention)" in section


def test_a_section_names_its_members_where_it_also_has_links():
    section = hooks.reference_section("a.b", {"own": "a.b", "other": "a.b.c"})
    assert "members:\n        - own\n" in section
    assert "- other" not in section
    assert "[`other`](#a.b.c.other)" in section


@pytest.mark.skipif(
    importlib.util.find_spec("humming") is None, reason="the page shows weights of Humming"
)
def test_the_tables_of_what_runs_where_follow_from_the_code():
    stored = support.PAGE.read_text(encoding="utf-8")
    assert support.page(stored) == stored, "run: python scripts/write_support_page.py"


def test_a_table_is_written_between_its_marks_only():
    text = "a\n<!-- engine -->\nold\n<!-- end -->\nb\n<!-- weights -->\n<!-- end -->\nc\n"
    written = support.page(text)
    assert written.startswith("a\n<!-- engine -->\n| operation |")
    assert "old" not in written
    assert "|\n<!-- end -->\nb\n<!-- weights -->\n| policy |" in written
    assert written.endswith("|\n<!-- end -->\nc\n")
    assert support.page(written) == written


@pytest.mark.parametrize(
    ("page", "text", "wanted"),
    [
        (
            "index.md",
            "[k](../packages/piper-kernels/README.md)",
            "packages/piper-kernels/README.md",
        ),
        ("packages/phyai-engine/README.md", "[c](../../docs/cli.md#run)", "../../cli.md#run"),
        ("CONTRIBUTING.md", "[r](README.md)", "index.md"),
        ("cli.md", "[i](images/rollout.png)", "images/rollout.png"),
        ("cli.md", "[plugin](../examples/kernel_plugin)", "examples/kernel_plugin/README.md"),
        ("cli.md", "[other](https://example.org/x)", "https://example.org/x"),
    ],
)
def test_links_are_followed_from_where_a_page_lies(page, text, wanted):
    known = pages() | {"images/rollout.png"}
    files = SimpleNamespace(get_file_from_path=lambda path: path if path in known else None)
    here = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    label = text.partition("]")[0]
    assert hooks.on_page_markdown(text, here, None, files) == f"{label}]({wanted})"


def test_a_link_to_no_page_becomes_its_name():
    files = SimpleNamespace(get_file_from_path=lambda path: None)
    here = SimpleNamespace(file=SimpleNamespace(src_uri="cli.md"))
    assert hooks.on_page_markdown("see [it](../scripts/test).", here, None, files) == "see it."
    assert hooks.on_page_markdown("[a.py](a.py) is", here, None, files) == "`a.py` is"


def test_long_names_in_tables_may_break_behind_a_dot():
    long, short = "a_module.with_a_long.name_in_it", "a_module.name"
    table = f"<td><code>{long}</code> <code>{short}</code></td>"
    text = f"<p><code>{long}</code></p>"
    found = hooks.on_page_content(table + text, None, None, None)
    assert (
        "<code>a_<wbr>module.<wbr>with_<wbr>a_<wbr>long.<wbr>name_<wbr>in_<wbr>it</code>" in found
    )
    assert f"<code>{short}</code></td>{text}" in found
    private = hooks.on_page_content(f"<td><code>_{long}</code></td>", None, None, None)
    assert private.startswith("<td><code>_a_<wbr>module.")


def test_roles_of_docstrings_are_dropped():
    html = "<p>see :func:<code>f</code> and :meth:</p>"
    assert hooks.on_page_content(html, None, None, None) == "<p>see <code>f</code> and :meth:</p>"


@pytest.mark.parametrize("name", diagrams.DIAGRAMS)
def test_drawings_are_current(name):
    stored = (ROOT / "docs" / "images" / f"{name}.svg").read_text(encoding="utf-8")
    assert stored == diagrams.DIAGRAMS[name].svg()
