"""The commands of ``python -m runners``: enrol, agent, doctor, worker, prove."""

import argparse
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import redis

from runners.host import enrolment, inventory, preflight
from runners.host.agent import Agent, AlreadyRunningError
from runners.host.doorbell import DoorbellWorkerSupervisor
from runners.host.reconcile import stop_all, summaries
from runners.host.redis_access import connect
from runners.host.shipping import RefusedError, ServerClient, ServerError
from runners.hub.settings import PASSED, TOKENS
from runners.prove import run as prove
from runners.shared import kubernetes, ray, slurm
from runners.shared.config import (
    DEFAULT_HOST_DIR,
    Credential,
    HostConfigError,
    HostDir,
    SchedulerSettings,
)
from runners.shared.environment import NOT_USED, environment_lines, service_lines
from runners.shared.facts import GpuFacts
from runners.shared.reasons import Reason
from runners.shared.redis_address import UnsafeAddressError
from runners.shared.timing import STOP_ALL_SECONDS
from runners.supervision import procfs

# ---------------------------------------------------------------------------
# Checks a host's requirements; each failed check has a remedy.
# ---------------------------------------------------------------------------


OLDEST_PYTHON = (3, 11)


class Check(NamedTuple):
    """The result of one check."""

    name: str
    is_ok: bool
    words: str


def checks(host_dir: HostDir) -> list[Check]:
    """Run and return every check."""
    return [*_machine(host_dir), *_enrolment(host_dir)]


def _machine(host_dir: HostDir) -> Iterator[Check]:
    version = ".".join(str(part) for part in sys.version_info[:3])
    yield Check(
        "Python", sys.version_info[:2] >= OLDEST_PYTHON, f"{version}; 3.11 or newer is needed"
    )
    has_proc = procfs.read_process(os.getpid()) is not None and hasattr(os, "pidfd_open")
    yield Check("Linux", has_proc, "/proc and pidfd are needed to watch over jobs")
    existing = next(path for path in (host_dir.path, *host_dir.path.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    needed = host_dir.config().min_free_bytes
    yield Check(
        "Disk",
        free >= needed,
        f"{free / 2**30:.1f} GiB free, {needed / 2**30:.1f} GiB needed for a new attempt",
    )
    if host_dir.path.exists():
        yield _folder(host_dir)
    versions = inventory.package_versions()
    yield Check(
        "torch",
        "torch" in versions,
        versions.get("torch") or "not installed: pip install 'slipway[worker,gpu]'",
    )
    yield from _gpus()
    for line in environment_lines(os.environ):
        yield Check("Environment", is_ok=NOT_USED not in line, words=line)


def _gpus() -> Iterator[Check]:
    """Check the GPUs of every vendor, and torch's build against their driver."""
    devices = inventory.devices()
    words = ", ".join(device_description(gpu) for gpu in devices.gpus)
    yield Check("GPU", is_ok=True, words=words or "none: jobs run on the processor")
    for gpu in devices.other_gpus:
        yield Check(
            "Other GPU", is_ok=True, words=f"{device_description(gpu)}: jobs do not use it"
        )
    silence = None if devices.gpus else inventory.driver_problem()
    for problem in filter(None, (*devices.problems, silence)):
        yield Check("GPU driver", is_ok=bool(devices.gpus), words=problem)
    with inventory.gpu_library() as library:
        if library and devices.gpus:
            runtime = preflight.runtime_check(library)
            words = " ".join(filter(None, [runtime.sentence, runtime.remedy]))
            yield Check("torch and driver", runtime.ok, words)


def device_description(gpu: GpuFacts) -> str:
    """Return a GPU's name, memory and what could not be read of it."""
    shared = " shared with the host" if gpu.shares_host_memory else ""
    parts = [f"{gpu.name} ({gpu.memory_bytes / 2**30:.0f} GiB{shared})"]
    return "; ".join([*parts, *(f"not read: {each}" for each in gpu.unread)])


def _folder(host_dir: HostDir) -> Check:
    is_open = host_dir.is_open()
    remedy = f"open to other users; make it yours alone: chmod 700 {host_dir.path}"
    words = remedy if is_open else f"{host_dir.path} is closed to other users"
    return Check("Folder", not is_open, words)


def _enrolment(host_dir: HostDir) -> Iterator[Check]:
    try:
        credential = host_dir.credential()
    except HostConfigError as error:
        yield Check("Credential", is_ok=False, words=str(error))
        return
    yield Check("Credential", is_ok=True, words=f"{credential.name} at {credential.server}")
    yield _server(credential)
    if credential.worker_url:
        yield _broker(credential.worker_url, host_dir.redis_ca())


def _server(credential: Credential) -> Check:
    try:
        client = ServerClient(credential.server, credential.credential)
    except ServerError as error:
        return Check("Server", is_ok=False, words=str(error))
    try:
        client.received_bytes("doctor", "doctor", PurePosixPath("doctor"))  # does not exist
    except RefusedError as refusal:
        is_out = refusal.is_unauthorized
        words = f"{refusal}; enrol this host again" if is_out else "answers"
        return Check("Server", not is_out, words)
    except ServerError as error:
        return Check("Server", is_ok=False, words=str(error))
    finally:
        client.close()
    return Check("Server", is_ok=True, words="answers")


def _broker(url: str, ca_file: Path | None) -> Check:
    try:
        broker = connect(url, ca_file, socket_timeout=2.0, socket_connect_timeout=1.0)
    except UnsafeAddressError as error:
        return Check("Redis", is_ok=False, words=str(error))
    try:
        broker.ping()
    except redis.RedisError as error:
        words = f"{error}; work continues over HTTP, starts and stops are a few seconds slower"
        return Check("Redis", is_ok=False, words=words)
    finally:
        broker.close()
    return Check("Redis", is_ok=True, words="answers")


# ---------------------------------------------------------------------------
# The commands of a host: enroll, work, unit, rotate, stop-all, status, doctor, prove.
# ---------------------------------------------------------------------------


# The agent's systemd unit: unprivileged, with write access only to the host's folder.
#
# ``KillMode=process`` and ``OOMPolicy=continue`` keep jobs running when the agent stops or
# restarts, or the OOM killer ends one of them. Devices stay visible because jobs need the GPUs.


TEMPLATE = """\
[Unit]
Description=Slipway host agent
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
{user}{environment}ExecStart={python} -m runners work --dir {folder}
Restart=always
RestartSec=1
TimeoutStopSec=20
KillMode=process
OOMPolicy=continue
Delegate=yes
UMask=0077
NoNewPrivileges=yes
ProtectSystem=strict
ReadWritePaths={folder}
PrivateTmp=yes
RestrictSUIDSGID=yes
LockPersonality=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes

[Install]
WantedBy={target}
"""


def render(
    folder: Path,
    *,
    python: str = sys.executable,
    user: str | None = None,
    variables: Mapping[str, str] | None = None,
) -> str:
    """Return a unit for the calling user's manager, or for the system's manager and ``user``.

    The certificates, proxies and settings of the hub of ``variables`` are part of it: a service
    does not inherit those of the shell in which the host was enrolled.
    """
    return TEMPLATE.format(
        user=f"User={user}\n" if user else "",
        environment="".join(service_lines(variables or {}, PASSED, TOKENS)),
        python=_quoted(python),
        folder=_quoted(str(folder)),
        target="multi-user.target" if user else "default.target",
    )


def _quoted(text: str) -> str:
    """Return a path escaped for systemd: quotes, backslashes, percent signs and spaces."""
    plain = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{plain}"' if any(character in plain for character in ' "\t') else plain


PROBLEMS = (
    HostConfigError,
    ServerError,
    enrolment.EnrolmentError,
    enrolment.RotationError,
    slurm.SlurmArgumentError,
    kubernetes.KubernetesArgumentError,
    ray.RayArgumentError,
)
EXIT_PROBLEM = 1
EXIT_BUSY = 75  # EX_TEMPFAIL: another agent is already running


def main(arguments: list[str]) -> int:
    """Run one command; print an error as one sentence on stderr and return exit code 1."""
    options = parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except AlreadyRunningError as error:
        print(error, file=sys.stderr)
        return EXIT_BUSY
    except PROBLEMS as error:
        print(error, file=sys.stderr)
        return EXIT_PROBLEM


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    top = argparse.ArgumentParser(prog="python -m runners", description=__doc__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    for name, function, words in (
        ("enroll", _enroll, "exchange a one-time token for a credential of this host"),
        ("work", _work, "serve the host until stopped; running jobs outlive it"),
        ("unit", _unit, "print a hardened systemd unit for the agent"),
        ("rotate", _rotate, "replace this host's secrets; the old ones end at once"),
        ("stop-all", _stop_all, "stop every running attempt and wait until it is gone"),
        ("status", _status, "list the attempts on this host's disk"),
        ("doctor", _doctor, "check what a host needs and say how to mend it"),
        ("prove", prove.run, prove.WORDS),
    ):
        command = commands.add_parser(name, help=words, description=words)
        command.set_defaults(command=function)
        command.add_argument("--dir", type=Path, default=DEFAULT_HOST_DIR, help="host's folder")
        if name == "stop-all":
            command.add_argument(
                "--with-site", action="store_true", help="because the site itself stops"
            )
            command.add_argument(
                "--no-wait", action="store_true", help="give the orders and return"
            )
        if name == "prove":
            prove.add_arguments(command)
        if name == "unit":
            command.add_argument("--system", metavar="USER", help="for /etc, run as this user")
        if name == "enroll":
            command.add_argument("--server", required=True, help="such as http://127.0.0.1:8000")
            command.add_argument("--token", required=True, help="from the Hosts page")
            command.add_argument("--name", help="what to call the host; default: its hostname")
            command.add_argument(
                "--address", help="by which other hosts reach this one; default: its first"
            )
        if name in ("enroll", "work"):
            slurm.add(command)
            kubernetes.add(command)
            ray.add(command)
    return top


def _scheduler(options: argparse.Namespace) -> SchedulerSettings | None:
    return ray.read(options) or kubernetes.read(options, options.dir) or slurm.read(options)


def _enroll(options: argparse.Namespace) -> int:
    credential = enrolment.enroll(
        HostDir(options.dir),
        options.server,
        options.token,
        options.name,
        options.address,
        _scheduler(options),
    )
    print(f"Enrolled as {credential.name} ({credential.host_id}) at {credential.server}")
    return 0


def _work(options: argparse.Namespace) -> int:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    host_dir = HostDir(options.dir)
    credential = host_dir.credential()
    if scheduler := _scheduler(options):
        host_dir.save_scheduler(scheduler)
    agent = Agent(host_dir, credential)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.stop())
    doorbell = DoorbellWorkerSupervisor(host_dir) if credential.redis_url else None
    agent.run(beside=doorbell)
    return 0


def _unit(options: argparse.Namespace) -> int:
    unit = render(HostDir(options.dir).path, user=options.system, variables=os.environ)
    print(unit, end="")
    return 0


def _rotate(options: argparse.Namespace) -> int:
    credential = enrolment.rotate(HostDir(options.dir))
    print(f"{credential.name} has new secrets; a running agent uses them from its next heartbeat")
    return 0


def _stop_all(options: argparse.Namespace) -> int:
    reason = Reason.SITE_STOPPED if options.with_site else Reason.STOPPED_BY_OPERATOR
    timeout = 0.0 if options.no_wait else STOP_ALL_SECONDS
    stopped = stop_all(HostDir(options.dir), reason=reason, timeout_seconds=timeout)
    if options.no_wait and not stopped.why:
        print(f"Told {len(stopped.running)} to stop")
        return 0
    number = len(stopped.ended)
    print(f"Stopped {number} running attempt{'' if number == 1 else 's'}")
    why = stopped.why or "its supervisor did not end it"
    for attempt_id in stopped.running:
        print(f"{attempt_id} still runs: {why}", file=sys.stderr)
    return EXIT_PROBLEM if stopped.running else 0


def _status(options: argparse.Namespace) -> int:
    for line in summaries(HostDir(options.dir)):
        print(line)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    results = checks(HostDir(options.dir))
    for check in results:
        print(f"{'ok  ' if check.is_ok else 'FAIL'} {check.name}: {check.words}")
    return 0 if all(check.is_ok for check in results) else EXIT_PROBLEM
