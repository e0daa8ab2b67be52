#!/usr/bin/env python3
"""The one command of this project: ``up``, ``test``, and everything that Django offers.

This file and what it imports first stay readable for old Pythons, so that they can say in one
sentence what is missing instead of failing on syntax.
"""

import sys
from pathlib import Path


def main() -> None:
    """Refuse an old Python by name, else hand over to the set-up code."""
    found = sys.version_info
    if found < (3, 11):
        sys.exit(
            f"Slipway needs Python 3.11 or newer; {sys.executable} is "
            f"{found[0]}.{found[1]}. Way out: install a newer Python and start it by name, "
            "for example `python3.12 manage.py up`."
        )
    root = str(Path(__file__).resolve().parent)
    if root not in sys.path:  # PYTHONSAFEPATH leaves it out
        sys.path.insert(0, root)
    from webapp.boot import cli  # only a new enough Python can read it

    sys.exit(cli.main(sys.argv[1:]))


if __name__ == "__main__":
    main()
