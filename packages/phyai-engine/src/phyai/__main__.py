"""``python -m phyai``: the same command line as the ``phyai`` script."""

import sys

from phyai.cli import main

if __name__ == "__main__":
    sys.exit(main())
