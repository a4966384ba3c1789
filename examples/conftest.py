"""What the tests of the example packages share."""

import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def install_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what installs a package the way an installer leaves it: sources and metadata.

    ``install(root)`` takes the folder of a package; ``install(project, modules)`` what stands under
    ``[project]`` and the folder of the modules. Modules of the package are forgotten afterwards.
    """
    before = set(sys.modules)

    def install(project: Any, modules: Path | None = None) -> None:
        source = project / "src" if modules is None else modules
        if modules is None:
            project = tomllib.loads((project / "pyproject.toml").read_text())["project"]
        site = tmp_path / "site-packages"
        name, version = project["name"], project["version"]
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = []
        for group, entries in project["entry-points"].items():
            lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
        (info / "entry_points.txt").write_text("\n".join(lines))
        for path in (source, site):
            monkeypatch.syspath_prepend(str(path))
        packages.update(path.name for path in source.iterdir() if path.is_dir())

    packages: set[str] = set()
    yield install
    for module in set(sys.modules) - before:
        if module.partition(".")[0] in packages:
            del sys.modules[module]
