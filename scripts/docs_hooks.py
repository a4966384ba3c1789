"""What MkDocs is told about this repository: pages outside of docs/, links, and the reference.

READMEs lie beside what they describe. They become pages of the site under their path in the
repository, and links are followed from where a page lies there. A link to a file that is no page,
such as a source file, becomes its name. The reference has a page for each package, with every
public module that names what is public.
"""
# pyright: reportMissingImports=false

import ast
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("packages", "examples")
SOURCES = {
    "piper_kernels": "packages/piper-kernels/src",
    "phyai_quant": "packages/phyai-quant/src",
    "phyai": "packages/phyai-engine/src",
}
CODE_OF_CELL = re.compile(r"(?<=<code>)[^<]{20,}(?=</code>)")
LINK = re.compile(r"(?P<text>\[[^\]]*\])\((?P<target>[^)\s#]*)(?P<anchor>#[^)\s]*)?\)")


def outside_pages() -> list[str]:
    """Return the pages outside of docs/ by their path in the repository, without the root's."""
    found = [*ROOT.glob("*.md")]
    for folder in FOLDERS:
        found += [*(ROOT / folder).rglob("README.md"), *(ROOT / folder).rglob("CHANGELOG.md")]
    paths = [page.relative_to(ROOT).as_posix() for page in found]
    return sorted(path for path in paths if path != "README.md" and "/.venv/" not in path)


def public_modules(package: str) -> list[str]:
    """Return the modules of a package, none of them private, that have ``__all__``."""
    base = ROOT / SOURCES[package]
    found = []
    for path in sorted((base / package).rglob("*.py")):
        parts = path.relative_to(base).with_suffix("").parts
        names = parts[:-1] if parts[-1] == "__init__" else parts
        if any(name.startswith("_") for name in names) or "cli" in names:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        targets = [
            target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
        ]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            found.append(".".join(names))
    return found


def reference_page(package: str) -> str:
    """Return the page that documents the public modules of a package."""
    modules = "\n".join(
        f"## {module}\n\n::: {module}\n    options:\n"
        "      show_root_heading: false\n      show_root_toc_entry: false\n"
        for module in public_modules(package)
    )
    return f"# {package}\n\n{modules}"


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
            return match["text"][1:-1]
        start = PurePosixPath(page.file.src_uri).parent
        return f"{match['text']}({os.path.relpath(wanted, start)}{anchor})"

    return LINK.sub(follow, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001
    """Let long names in tables break behind their dots and underscores."""

    def breakable(cell: re.Match[str]) -> str:
        return CODE_OF_CELL.sub(
            lambda code: re.sub(r"(?<=[._:/])(?=\w)", "<wbr>", code[0]), cell[0]
        )

    return re.sub(r"<td[ >].*?</td>", breakable, html, flags=re.DOTALL)
