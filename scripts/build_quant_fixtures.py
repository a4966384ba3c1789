"""Write the fixtures of tests/test_oracles.py with the tools whose checkpoints they are.

    python scripts/build_quant_fixtures.py [--output FOLDER] [TOOL ...]

The tools need versions of the same libraries that exclude each other, so each of their scripts
names its own and runs apart, by uv. No GPU is needed. Fixtures of unchanged tools come out equal.
"""

import argparse
import subprocess
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
TOOLS = ("llmcompressor", "modelopt", "compressed_tensors", "act_order")


def command(tool: str, output: Path | None) -> list[str]:
    """Returns the command that writes the fixtures of one tool."""
    script = str(SCRIPTS / f"quant_fixtures_{tool}.py")
    options = [] if output is None else ["--output", str(output)]
    return ["uv", "run", "--isolated", "--script", script, *options]


def main() -> None:
    """Runs the named tools, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tools", nargs="*", metavar="TOOL", help=", ".join(TOOLS))
    parser.add_argument("--output", type=Path, help="default: the fixtures of the tests")
    arguments = parser.parse_args()
    unknown = set(arguments.tools) - set(TOOLS)
    if unknown:
        parser.error(f"unknown tools {', '.join(sorted(unknown))}; known: {', '.join(TOOLS)}")
    for tool in arguments.tools or TOOLS:
        subprocess.run(command(tool, arguments.output), check=True)


if __name__ == "__main__":
    main()
