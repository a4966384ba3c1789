"""Print the oldest versions that the wheels accept, one requirement a line, extras included.

    python scripts/oldest_requirements.py > oldest.txt

For ``uv pip install --requirement`` or ``--constraint``, outside the checkout, whose own
constraints name the newest. Python 3.12 has wheels of all of them.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ("piper-kernels", "phyai-quant", "phyai-engine")


def oldest(root: Path = ROOT) -> list[str]:
    """Return ``name==version`` lines with their markers; the wheels themselves are left out.

    Raises:
        ValueError: a requirement states no oldest version, or two wheels state different ones.
    """
    found: dict[str, str] = {}
    for wheel in WHEELS:
        path = root / "packages" / wheel / "pyproject.toml"
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        extras = project.get("optional-dependencies", {}).values()
        for line in [*project["dependencies"], *(line for lines in extras for line in lines)]:
            parts = re.match(r"(?P<name>[\w.-]+)(?:\[[^\]]*\])?(?:>=(?P<version>[\w.]+))?", line)
            name = parts["name"] if parts else line
            if name in WHEELS:
                continue
            if not parts or not parts["version"]:
                raise ValueError(f"{wheel}: '{line}' states no oldest version: write >=X")
            _, semicolon, marker = line.partition(";")
            pinned = f"{name}=={parts['version']}{semicolon}{marker}"
            if found.setdefault(name, pinned) != pinned:
                raise ValueError(f"{wheel}: {name} is '{pinned}' here, '{found[name]}' elsewhere")
    return [found[name] for name in sorted(found)]


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in oldest())
