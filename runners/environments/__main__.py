"""Build one environment: ``python -m runners.environments HOST_DIR NAME [ORDER_ID]``."""

import signal
import sys
from pathlib import Path

from runners.config import HostDir
from runners.environments.builder import BuildError, Step, ensure
from runners.environments.pins import PinsError
from runners.environments.store import Store

TERMINATED = 143


def say(step: Step) -> None:
    """Print how far the build is."""
    print(f"{step.done}/{step.total} {step.words}", flush=True)


def main() -> int:
    """Build it; a problem is one sentence on stderr and exit code 1."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # what is unfinished goes
    folder, name, *order = sys.argv[1:]
    store = Store(HostDir(Path(folder)))
    try:
        ensure(store, store.pins(name), say, *order[:1])
    except (BuildError, PinsError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
