"""Command line of a host: ``python -m runners COMMAND``, also installed as ``slipway-host``.

``prove`` runs where only torch and pydantic are installed, so it is chosen before the modules of
the other commands are imported.
"""

import os
import sys

from runners.shared.environment import escape_unknown_characters


def run() -> int:
    """Run the command in argv with a umask that denies access to other users."""
    os.umask(0o077)
    escape_unknown_characters()
    return main(sys.argv[1:])


def main(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    if arguments[:1] == ["prove"]:
        from runners.prove import run

        return run.main(arguments[1:])
    from runners.host import commands

    return commands.main(arguments)


if __name__ == "__main__":
    sys.exit(run())
