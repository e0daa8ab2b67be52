"""Run a job on several ranks of this machine, as a host's supervisor starts them."""

import subprocess
import sys
from typing import Any

from runners.jobs.events import read_events
from runners.jobspec import GenerateSpec, TrainSpec
from runners.launchers.launch import gang_env, torchrun_argv
from runners.shared.messages import Gang, RunRequest
from tests.stack import free_port
from tests.system.jobs.harness import Finished, Host


def run_on_ranks(
    host: Host, name: str, spec: TrainSpec | GenerateSpec, count: int = 2
) -> Finished:
    """Run the job to its end; what the ranks wrote is left in stdout.txt."""
    place = Gang(
        node_rank=0, num_nodes=1, num_processes=count, master_address="127.0.0.1",
        master_port=free_port(), own_address="127.0.0.1", rendezvous_id=name,
    )  # fmt: skip
    folder = host.attempt(name, spec)
    request = RunRequest.model_validate_json((folder / "spec.json").read_bytes())
    request = request.model_copy(update={"gang": place})
    (folder / "spec.json").write_text(request.model_dump_json())
    command = [sys.executable, "-m", f"runners.jobs.{spec.kind}", str(folder)]
    with (folder / "events.jsonl").open("ab") as events:
        process = subprocess.Popen(
            torchrun_argv(command, place, spec.parallel),
            env=host.environment() | gang_env(place) | {"SLIPWAY_EVENT_FD": str(events.fileno())},
            pass_fds=[events.fileno()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    stdout, stderr = process.communicate(timeout=900)
    (folder / "stdout.txt").write_text(stdout)
    return Finished(folder, process.returncode, read_events(folder / "events.jsonl"), stderr)


def start(
    argv: list[str], env: dict[str, str], more: dict[str, str], **options: Any
) -> "subprocess.Popen[str]":
    """Start a module with more variables."""
    return subprocess.Popen(argv, env=env | more, **options)
