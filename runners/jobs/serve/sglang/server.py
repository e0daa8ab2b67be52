"""Become SGLang's server, its key in no list of processes: ``python -m … ARGUMENT…``.

SGLang takes its key as an argument alone; the key is added to this process's own list of them,
which the system does not show. Those that it starts are handed their settings by a pipe.
"""

import os
import runpy
import sys

KEY = "SLIPWAY_ENGINE_KEY"
SERVER = "sglang.launch_server"


def main() -> None:
    """Run the server's module with the key that the environment has."""
    sys.argv = [SERVER, *sys.argv[1:], "--api-key", os.environ.pop(KEY)]
    runpy.run_module(SERVER, run_name="__main__")


if __name__ == "__main__":
    main()
