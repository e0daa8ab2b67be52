"""Run a generation on ranks that are forked from this process, without a launcher and imports."""

import os
import sys
import traceback

from runners.jobs.events import read_events
from runners.jobs.generate.job import work
from runners.jobspec import GenerateSpec
from tests.stack import free_port
from tests.system.jobs.harness import Finished, Host


def run_on_forks(host: Host, name: str, spec: GenerateSpec, count: int = 2) -> Finished:
    """Run the job's work on each rank to its end; torchrun would set the same variables."""
    told = {
        "TORCHELASTIC_RUN_ID": name,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(count),
    }
    pids = []
    for rank in range(count):
        pid = os.fork()
        if not pid:
            os.environ |= {**told, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            _end(host, name, spec)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    folder = host.path / "attempts" / name
    failed = next(filter(None, codes), 0)
    return Finished(folder, failed, read_events(folder / "events.jsonl"), f"ends: {codes}")


def _end(host: Host, name: str, spec: GenerateSpec) -> None:
    code = 1
    try:
        host.run_here(name, spec, work)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
