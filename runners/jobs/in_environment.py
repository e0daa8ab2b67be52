"""Start a job in a named environment; the arguments are its name, the job's module, its folder.

Several names are separated by commas: the job starts in the first and uses the others. A missing
environment is built first, as a phase of the job with progress. Then this process
execs the job with the environment's interpreter and keeps its pid for the supervisor.
"""

import os
import signal
import sys
from pathlib import Path

from runners.environments.builder import BuildError, PinsError, Step, Store, ensure, pip_variables
from runners.jobs.events import Emitter
from runners.jobs.runtime import EXIT_BAD_INPUT, HOST_DIR_VARIABLE
from runners.shared.config import HostDir
from runners.shared.environment import tracker_variables
from runners.shared.messages import MAIN
from runners.supervision.classification import ENVIRONMENT_NOT_BUILT

TERMINATED = 143
STARTING = "Starting the job's program"


def prepare_environment(store: Store, name: str) -> Path:
    """Return an environment's interpreter; build it if missing and protect it from removal.

    The agent's own is always there.

    Raises:
        BuildError: the environment cannot be built.
        PinsError: there is no such environment on this host.
    """
    if name == MAIN:
        return Path(sys.executable)
    store.hold(name)  # until this process ends, also after exec
    pins = store.pins(name)
    if not store.is_ready(pins):
        emitter = Emitter.from_environment()
        emitter.phase(f"Building the environment {name}")

        def report(step: Step) -> None:
            emitter.log(f"environment {name}: {step.words}")
            emitter.progress(step.done, step.total, "steps")

        try:
            ensure(store, pins, report)
            emitter.phase(STARTING, begins_anew=True)
        finally:
            emitter.close()
    return store.python(pins)


def drop_pip_variables() -> None:
    """Remove pip's variables before the job's own program: an index URL may contain a password."""
    for variable in pip_variables().keys() - tracker_variables():
        del os.environ[variable]


def main() -> None:
    """Exec the job; if the environment fails, exit with 3 and the cause on stderr."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    name, module, folder = sys.argv[1:]
    host_dir = os.environ.get(HOST_DIR_VARIABLE) or str(Path(folder).parent.parent)
    try:
        store = Store(HostDir(Path(host_dir)))
        python, *_others = [prepare_environment(store, each) for each in name.split(",")]
    except (BuildError, PinsError) as error:
        sys.stderr.write(f"{ENVIRONMENT_NOT_BUILT}: {error}\n")
        sys.exit(EXIT_BAD_INPUT)
    drop_pip_variables()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.execv(python, [str(python), "-m", module, folder])  # noqa: S606 - no shell: a list


if __name__ == "__main__":
    main()
