"""The command line of PhyAI. ``phyai --help`` lists the commands.

Importing this package loads no tensor library: each command imports what it needs when it runs.
"""

from phyai.cli.app import main

__all__ = ["main"]
