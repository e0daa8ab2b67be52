"""The commands of a host: enroll, work, unit, rotate, stop-all, status, doctor, prove."""

import argparse
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from runners import enrolment, slurm_options
from runners.agent import Agent, AlreadyRunningError
from runners.client import ServerError
from runners.config import DEFAULT_HOST_DIR, HostConfigError, HostDir
from runners.doctor import checks
from runners.doorbell import DoorbellChild
from runners.prove import command as prove
from runners.reasons import Reason
from runners.reconcile import STOP_ALL_SECONDS, stop_all, summaries

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
{user}ExecStart={python} -m runners work --dir {folder}
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


def render(folder: Path, *, python: str = sys.executable, user: str | None = None) -> str:
    """Return a unit for the calling user's manager, or for the system's manager and ``user``."""
    return TEMPLATE.format(
        user=f"User={user}\n" if user else "",
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
    slurm_options.SlurmArgumentError,
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
            slurm_options.add(command)
    return top


def _enroll(options: argparse.Namespace) -> int:
    slurm = slurm_options.read(options)
    credential = enrolment.enroll(
        HostDir(options.dir), options.server, options.token, options.name, options.address, slurm
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
    agent = Agent(host_dir, credential)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.stop())
    doorbell = DoorbellChild(host_dir) if credential.redis_url else None
    agent.run(beside=doorbell)
    return 0


def _unit(options: argparse.Namespace) -> int:
    print(render(options.dir.resolve(), user=options.system), end="")
    return 0


def _rotate(options: argparse.Namespace) -> int:
    credential = enrolment.rotate(HostDir(options.dir))
    print(f"{credential.name} has new secrets; a running agent uses them from its next heartbeat")
    return 0


def _stop_all(options: argparse.Namespace) -> int:
    reason = Reason.SITE_STOPPED if options.with_site else Reason.STOPPED_BY_OPERATOR
    patience = 0.0 if options.no_wait else STOP_ALL_SECONDS
    stopped = stop_all(HostDir(options.dir), reason=reason, patience_seconds=patience)
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
