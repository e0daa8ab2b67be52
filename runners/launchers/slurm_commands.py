"""Slurm's own programs, asked with a time limit; what they print becomes states and sentences.

The text formats named here are the same in every version since 15.08. ``squeue --json`` is not
used: its fields changed type between versions, and 22.05 answers with every job of the cluster.
"""

import getpass
import os
import subprocess
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

TIMEOUT_SECONDS = 20.0
NUM_FIELDS = 5  # that squeue and sacct are asked for
PASSED = ("HOME", "LOGNAME", "PATH", "SLURM_CONF", "USER")
# What the controller being away sounds like: ask again, nothing is decided.
AWAY = (
    "unable to contact slurm", "socket timed out", "connection refused", "transport endpoint",
    "zero bytes were transmitted", "i/o error", "temporarily", "slurm backup controller",
    "protocol authentication error", "munge", "configuration source",
)  # fmt: skip


class SlurmError(Exception):
    """A Slurm program said no; the text is what it said."""


class SlurmAwayError(SlurmError):
    """Slurm does not answer: nothing is known, and nothing may be concluded."""


class Phase(StrEnum):
    """Where a job is in its life, whatever Slurm calls it."""

    WAITING = "waiting"
    ACTIVE = "active"
    ENDED = "ended"


_WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED",
                      "RESV_DEL_HOLD", "SPECIAL_EXIT"})  # fmt: skip
_ENDED = frozenset({"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL",
                    "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"})  # fmt: skip


class SlurmJob(NamedTuple):
    """One job as Slurm tells it."""

    job_id: str
    state: str
    detail: str = ""  # why it waits, or its exit code
    name: str = ""
    nodes: str = ""

    @property
    def phase(self) -> Phase:
        """Return where it is; a state that nobody knows yet counts as running."""
        if self.state in _WAITING:
            return Phase.WAITING
        return Phase.ENDED if self.state in _ENDED else Phase.ACTIVE


class Partition(NamedTuple):
    """A line of sinfo."""

    name: str
    is_up: bool
    time_limit: str
    nodes: int
    cpus_per_node: str
    memory_mib: str
    gres: str


def run(program: str, *arguments: str, cwd: Path | None = None) -> str:
    """Run one of Slurm's programs and return what it printed.

    Raises:
        SlurmAwayError: Slurm does not answer.
        SlurmError: it answered, with a refusal.
    """
    env = {name: os.environ[name] for name in PASSED if name in os.environ}
    try:
        done = subprocess.run(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_SECONDS,
            env=env | {"LC_ALL": "C"},
            cwd=cwd,
            check=False,
        )
    except FileNotFoundError:
        raise SlurmAwayError(f"{program} is not installed here, or not on the PATH") from None
    except subprocess.TimeoutExpired:
        raise SlurmAwayError(f"{program} took over {TIMEOUT_SECONDS:.0f} s") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"{program} ended with {done.returncode}"
        is_away = any(words in said.lower() for words in AWAY)
        raise (SlurmAwayError if is_away else SlurmError)(said[:500])
    return done.stdout


def submit(options: Sequence[str], script: Path) -> str:
    """Queue a batch script and return the job's id.

    Raises:
        SlurmError: it was refused.
    """
    return read_job_id(run("sbatch", "--parsable", *options, str(script)))


def read_job_id(text: str) -> str:
    """Return the id from ``sbatch --parsable``: ``id`` or ``id;cluster``.

    Raises:
        SlurmError: it is not there.
    """
    lines = text.strip().splitlines()
    job_id = lines[-1].partition(";")[0].strip() if lines else ""
    if not job_id.isdigit():
        raise SlurmError(f"sbatch printed no job id: {text[:200]!r}")
    return job_id


def queue() -> list[SlurmJob]:
    """Return this user's jobs, those included that ended a few minutes ago.

    Raises:
        SlurmError: there is no answer.
    """
    user = f"--user={getpass.getuser()}"
    return read_queue(run("squeue", "--noheader", "--states=all", user, "--format=%i|%T|%r|%N|%j"))


def read_queue(text: str) -> list[SlurmJob]:
    """Return the jobs of squeue's lines; a line of another form is left out."""
    fields = [line.strip().split("|", NUM_FIELDS - 1) for line in text.splitlines()]
    return [
        SlurmJob(job_id, state, _plain(reason), name, nodes)
        for job_id, state, reason, nodes, name in (
            each for each in fields if len(each) == NUM_FIELDS
        )
    ]


def _plain(text: str) -> str:
    return "" if text.strip("()") in {"", "None", "null"} else text.strip("()")


def ended(job_id: str) -> SlurmJob | None:
    """Return how a job ended that the queue no longer lists: from accounting, else control.

    Raises:
        SlurmAwayError: Slurm does not answer.
    """
    try:
        text = run(
            "sacct", "--allocations", "--noheader", "--parsable2", f"--jobs={job_id}",
            "--format=JobID,State,ExitCode,NodeList,JobName",
        )  # fmt: skip
        if found := read_accounting(text):
            return found
    except SlurmAwayError:
        raise
    except SlurmError:
        pass  # accounting is switched off here
    try:
        return read_control(run("scontrol", "show", "job", job_id, "--oneliner"))
    except SlurmAwayError:
        raise
    except SlurmError:
        return None  # it ended longer ago than Slurm remembers


def read_accounting(text: str) -> SlurmJob | None:
    """Return the last job of sacct's lines: a job that was requeued has one for each run."""
    rows = [line.split("|", NUM_FIELDS - 1) for line in text.strip().splitlines()]
    rows = [row for row in rows if len(row) == NUM_FIELDS]
    if not rows:
        return None
    job_id, state, exit_code, nodes, name = rows[-1]
    return SlurmJob(job_id, state.split()[0].rstrip("+"), exit_code, name, _plain(nodes))


def read_control(text: str) -> SlurmJob | None:
    """Return the job of ``scontrol show job --oneliner``."""
    fields = dict(word.partition("=")[::2] for word in text.split() if "=" in word)
    if "JobId" not in fields or "JobState" not in fields:
        return None
    return SlurmJob(
        fields["JobId"],
        fields["JobState"],
        fields.get("ExitCode", ""),
        fields.get("JobName", ""),
        _plain(fields.get("NodeList", "")),
    )


def partitions() -> list[Partition]:
    """Return what the cluster offers.

    Raises:
        SlurmError: there is no answer.
    """
    return read_partitions(run("sinfo", "--noheader", "--format=%R|%a|%l|%D|%c|%m|%G"))


def read_partitions(text: str) -> list[Partition]:
    """Return the partitions of sinfo's lines, one for each kind of node in them."""
    rows = [[word.strip() for word in line.split("|")] for line in text.splitlines()]
    return [
        Partition(
            name, state == "up", limit, int(nodes), cpus.rstrip("+"), memory.rstrip("+"),
            _plain(gres),
        )
        for name, state, limit, nodes, cpus, memory, gres in rows
        if nodes.isdigit()
    ]  # fmt: skip


def version() -> str:
    """Return Slurm's version, such as 22.05.8.

    Raises:
        SlurmError: there is no answer.
    """
    return run("sinfo", "--version").strip().removeprefix("slurm ").removeprefix("slurm-wlm ")
