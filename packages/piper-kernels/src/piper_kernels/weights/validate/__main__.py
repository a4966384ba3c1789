"""Validate weight files from the command line."""

import argparse
import sys
from collections.abc import Sequence

from piper_kernels.weights.validate import validate_file

EXIT_SOUND = 0
EXIT_FINDINGS = 1
EXIT_UNREADABLE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the findings of every file; return 0 without any, 1 with some, 2 if unreadable."""
    parser = argparse.ArgumentParser(
        prog="python -m piper_kernels.weights.validate",
        description="Check safetensors files of quantized weights: header, storage, every value.",
        epilog="Exit status: 0 no finding, 1 findings, 2 a file could not be opened.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE")
    status = EXIT_SOUND
    for path in parser.parse_args(arguments).files:
        try:
            findings = validate_file(path)
        except OSError as error:
            sys.stderr.write(f"{path}: {error.strerror}\n")
            status = EXIT_UNREADABLE
            continue
        for finding in findings:
            sys.stdout.write(f"{path}: {finding}\n")
        noun = "finding" if len(findings) == 1 else "findings"
        sys.stdout.write(f"{path}: {len(findings) or 'no'} {noun}\n")
        status = max(status, EXIT_FINDINGS if findings else EXIT_SOUND)
    return status


if __name__ == "__main__":
    sys.exit(main())
