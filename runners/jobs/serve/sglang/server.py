"""Run SGLang's server without its key in the process list: ``python -m … ARGUMENT…``.

SGLang takes its key only as an argument; the key is added to ``sys.argv`` in the process, which
the system does not show. Its child processes receive their settings through a pipe.
"""

import os
import runpy
import sys

KEY = "SLIPWAY_ENGINE_KEY"
SERVER = "sglang.launch_server"


def main() -> None:
    """Run the server's module with the key from the environment."""
    sys.argv = [SERVER, *sys.argv[1:], "--api-key", os.environ.pop(KEY)]
    runpy.run_module(SERVER, run_name="__main__")


if __name__ == "__main__":
    main()
