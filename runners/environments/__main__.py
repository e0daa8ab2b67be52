"""Build one environment: ``python -m runners.environments HOST_DIR NAME [ORDER_ID]``."""

import signal
import sys
from pathlib import Path

from runners.environments.builder import BuildError, PinsError, Step, Store, ensure
from runners.shared.config import HostDir

TERMINATED = 143


def print_step(step: Step) -> None:
    """Print a build step."""
    print(f"{step.done}/{step.total} {step.words}", flush=True)


def main() -> int:
    """Build the environment; print an error on stderr and return exit code 1."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # deletes the unfinished build
    folder, name, *order = sys.argv[1:]
    store = Store(HostDir(Path(folder)))
    try:
        ensure(store, store.pins(name), print_step, *order[:1])
    except (BuildError, PinsError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
