"""What MkDocs is told about this repository: pages outside of docs/, links, and the reference.

READMEs lie beside what they describe. They become pages of the site under their path in the
repository, and links are followed from where a page lies there. A link to a file that is no page,
such as a source file, becomes its name. The reference has a page for each package, with the names
that the tests hold as public: those of ``__all__``, and those that pages and examples import.
"""
# pyright: reportMissingImports=false

import ast
import json
import os
import re
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("packages", "examples")
SOURCES = {
    "piper_kernels": "packages/piper-kernels/src",
    "phyai_quant": "packages/phyai-quant/src",
    "phyai": "packages/phyai-engine/src",
}
SURFACES = ("tests/public_names.json", "packages/piper-kernels/tests/public_surface.json")
ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):(?=<code>)")
CODE_OF_CELL = re.compile(r"(?<=<code>)[^<]{20,}(?=</code>)")
BREAK = re.compile(r"(?<=\w[._:/])(?=\w)")
FILE_NAME = re.compile(r"[\w/-]+\.\w+")
HEADING = re.compile(
    r'<h\d id="(?P<path>[\w.]+)" class="doc doc-heading">.*?</h\d>\s*'
    r'<div class="doc doc-contents[^"]*">\s*(?:<p>.*?</p>)?',
    re.DOTALL,
)
LINK = re.compile(r"(?P<text>\[[^\]]*\])\((?P<target>[^)\s#]*)(?P<anchor>#[^)\s]*)?\)")


def outside_pages() -> list[str]:
    """Return the pages outside of docs/ by their path in the repository, without the root's."""
    found = [*ROOT.glob("*.md")]
    for folder in FOLDERS:
        found += [*(ROOT / folder).rglob("README.md"), *(ROOT / folder).rglob("CHANGELOG.md")]
    paths = [page.relative_to(ROOT).as_posix() for page in found]
    return sorted(path for path in paths if path != "README.md" and "/.venv/" not in path)


@cache
def public_surface() -> dict[str, dict[str, Any]]:
    """Return the public names by module as the tests hold them, each with its description."""
    surface: dict[str, dict[str, Any]] = {}
    for path in SURFACES:
        surface |= json.loads((ROOT / path).read_text(encoding="utf-8"))
    return surface


@cache
def enumerations() -> dict[str, dict[str, str]]:
    """Return the members of every public enumeration, by its path: name to value."""
    return {
        f"{module}.{name}": described
        for module, names in public_surface().items()
        for name, described in names.items()
        if isinstance(described, dict) and "constructor" not in described
    }


def public_modules(package: str) -> list[str]:
    """Return the modules of a package, none of them private, that have public names."""
    return list(public_names(package))


def public_names(package: str) -> dict[str, dict[str, str]]:
    """Return the public modules of a package: each public name and where it comes from.

    A name that a module takes from another public module comes from there, else from itself.
    """
    base = ROOT / SOURCES[package]
    found, taken = {}, {}
    for path in sorted((base / package).rglob("*.py")):
        parts = path.relative_to(base).with_suffix("").parts
        names = parts[:-1] if parts[-1] == "__init__" else parts
        if any(name.startswith("_") for name in names) or "cli" in names:
            continue
        body = ast.parse(path.read_text(encoding="utf-8")).body
        held = public_surface().get(".".join(names), {})
        imported = [name for name, described in held.items() if described != "module"]
        exported = list(dict.fromkeys([*(exported_names(body) or []), *imported]))
        if exported:
            found[".".join(names)] = exported
            taken[".".join(names)] = {
                alias.name: node.module
                for node in body
                if isinstance(node, ast.ImportFrom)
                for alias in node.names
            }

    def origin(module: str, name: str) -> str:
        source = taken[module].get(name)
        return origin(source, name) if name in found.get(source, ()) else module

    return {
        module: {name: origin(module, name) for name in exported}
        for module, exported in found.items()
    }


def exported_names(body: list[ast.stmt]) -> list[str] | None:
    """Return what ``__all__`` of a module names, or None where it has none that can be read."""
    for node in body:
        if not isinstance(node, ast.Assign):
            continue
        if any(isinstance(name, ast.Name) and name.id == "__all__" for name in node.targets):
            constants = [part for part in ast.walk(node.value) if isinstance(part, ast.Constant)]
            return [part.value for part in constants if isinstance(part.value, str)]
    return None


def reference_page(package: str) -> str:
    """Return the page that documents the public modules of a package, every name once."""
    modules = "\n".join(
        reference_section(module, names) for module, names in public_names(package).items()
    )
    return f"# Reference of {package}\n\n{modules}"


def reference_section(module: str, names: dict[str, str]) -> str:
    """Return the section of a module; names of other public modules are links to there."""
    links = [f"[`{name}`](#{at}.{name})" for name, at in names.items() if at != module]
    own = "".join(f"\n        - {name}" for name, at in names.items() if at == module)
    members = f"      members:{own}\n" if own else "      members: false\n"
    also = f"\nAlso to be imported from here: {', '.join(links)}.\n" if links else ""
    return (
        f"## {module}\n\n::: {module}\n    options:\n"
        "      show_root_heading: false\n      show_root_toc_entry: false\n"
        f"{members}{also}"
    )


def place_in_repository(page: str) -> PurePosixPath:
    """Return where a page of the site lies in the repository."""
    path = PurePosixPath(page)
    return path if page in outside_pages() else "docs" / path


def place_in_site(path: str) -> str:
    """Return the site's path of a file of the repository."""
    return path.removeprefix("docs/")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie outside of docs/, and those of the reference."""
    from mkdocs.structure.files import File

    for path in outside_pages():
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, path, content=text))
    for package in SOURCES:
        text = reference_page(package)
        files.append(File.generated(config, f"reference/{package}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001
    """Point links at the site's pages."""
    folder = place_in_repository(page.file.src_uri).parent

    def follow(match: re.Match[str]) -> str:
        target, anchor = match["target"], match["anchor"] or ""
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        path = os.path.normpath(folder / target)
        if (ROOT / path).is_dir() and (ROOT / path / "README.md").is_file():
            path = f"{path}/README.md"
        wanted = "index.md" if path == "README.md" else place_in_site(path)
        if files.get_file_from_path(wanted) is None:
            text = match["text"][1:-1]
            return f"`{text}`" if FILE_NAME.fullmatch(text) else text
        start = PurePosixPath(page.file.src_uri).parent
        return f"{match['text']}({os.path.relpath(wanted, start)}{anchor})"

    return LINK.sub(follow, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001
    """Name the members of enumerations, break long names in tables, drop roles of docstrings.

    A name breaks behind a dot or an underscore that does not begin it.
    """

    def breakable(cell: re.Match[str]) -> str:
        return CODE_OF_CELL.sub(lambda code: BREAK.sub("<wbr>", code[0]), cell[0])

    def with_members(heading: re.Match[str]) -> str:
        members = enumerations().get(heading["path"], {})
        listed = ", ".join(f"<code>{name}</code> ({value})" for name, value in members.items())
        return f"{heading[0]}\n<p>Members: {listed}.</p>" if members else heading[0]

    html = HEADING.sub(with_members, ROLE.sub("", html))
    return re.sub(r"<td[ >].*?</td>", breakable, html, flags=re.DOTALL)
