"""Runs Slurm's command-line programs with a timeout, and parses their output."""

import getpass
import json
import logging
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from runners.launchers.scheduler import PREFIX, Phase, SchedulerError, SchedulerUnreachableError
from runners.launchers.slurm_arrays import indices
from runners.launchers.slurm_end import ENDED, read_fields
from runners.shared.log_text import last_line, lines_of, shortened

TIMEOUT_SECONDS = 20.0
MESSAGE_CHARACTERS = 500
NUM_FIELDS = 5  # of squeue's and sacct's output
# The second is the most bytes of a list of an array's tasks (64 unless stated), 0: no limit.
# https://slurm.schedmd.com/squeue.html#OPT_SLURM_BITSTR_LEN
OWN = {"LC_ALL": "C", "SLURM_BITSTR_LEN": "0"}
PASSED = ("HOME", "LOGNAME", "PATH", "SLURM_CONF", "USER")
# Messages of an unreachable controller: the command is retried later.
UNREACHABLE_MESSAGES = (
    "unable to contact slurm", "socket timed out", "connection refused", "transport endpoint",
    "zero bytes were transmitted", "i/o error", "temporarily", "slurm backup controller",
    "protocol authentication error", "munge", "configuration source",
)  # fmt: skip


log = logging.getLogger(__name__)


class SlurmError(SchedulerError):
    """A Slurm program failed; the text is its error message."""


class SlurmUnreachableError(SlurmError, SchedulerUnreachableError):
    """Slurm does not answer: the state of its jobs is unknown."""


_WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED",
                      "RESV_DEL_HOLD", "SPECIAL_EXIT"})  # fmt: skip


class SlurmJob(NamedTuple):
    """One job as reported by Slurm."""

    job_id: str
    state: str
    detail: str = ""  # pending reason, or exit code
    name: str = ""
    nodes: str = ""
    end_words: str = ""  # Slurm has none beyond the state

    @property
    def phase(self) -> Phase:
        """Return the job's phase; an unknown state counts as active."""
        if self.state in _WAITING:
            return Phase.WAITING
        return Phase.ENDED if self.state in ENDED else Phase.ACTIVE


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
    """Run a Slurm program and return its output.

    Raises:
        SlurmUnreachableError: Slurm does not answer.
        SlurmError: Slurm rejected the command.
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
            env=env | OWN,
            cwd=cwd,
            check=False,
        )
    except FileNotFoundError:
        raise SlurmUnreachableError(
            f"{program} is not installed here, or not on the PATH"
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmUnreachableError(f"{program} took over {TIMEOUT_SECONDS:.0f} s") from None
    if done.returncode:
        message = (done.stderr or done.stdout).strip() or f"{program} ended with {done.returncode}"
        is_away = any(words in message.lower() for words in UNREACHABLE_MESSAGES)
        raise (SlurmUnreachableError if is_away else SlurmError)(_quoted(message))
    return done.stdout


def _quoted(message: str) -> str:
    """Return what a command said in one line: Slurm's refusals have several."""
    return shortened(" ".join(filter(None, map(str.strip, lines_of(message)))), MESSAGE_CHARACTERS)


def submit(options: Sequence[str], script: Path) -> str:
    """Queue a batch script and return the job's id.

    Raises:
        SlurmError: Slurm rejected the script.
    """
    return read_job_id(run("sbatch", "--parsable", *options, str(script)))


def read_job_id(text: str) -> str:
    """Return the job id of ``sbatch --parsable`` output: ``id`` or ``id;cluster``.

    Raises:
        SlurmError: the output has no job id.
    """
    said = last_line(text)
    job_id = said.partition(";")[0].strip()
    if not job_id.isdigit():
        raise SlurmError(f"sbatch printed no job id: {said!r}")
    return job_id


def requeue(job_id: str) -> None:
    """Put a running job back into the queue, which ends its processes.

    Raises:
        SlurmError: Slurm does not requeue it.
    """
    run("scontrol", "requeue", job_id)


def node_names(node_list: str) -> list[str]:
    """Return the names of a node list such as ``n[1-2]``, in the allocation's order.

    Raises:
        SlurmError: there is no answer.
    """
    return run("scontrol", "show", "hostnames", node_list).split()


def node_address(name: str) -> str:
    """Return the IP address at which Slurm reaches a node.

    Raises:
        SlurmError: Slurm does not know the node, or its address is not resolved.
    """
    fields = read_fields(run("scontrol", "show", "node", name, "--oneliner"))
    address = fields.get("NodeAddr", name)
    try:
        (*_, place), *_ = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise SlurmError(f"node {name}: its address {address} is not resolved: {error}") from None
    return str(place[0])


def queue() -> list[SlurmJob]:
    """Return this user's jobs, including those that ended a few minutes ago.

    Raises:
        SlurmError: there is no answer.
    """
    name = getpass.getuser()
    asked = ("--states=all", f"--user={name}")
    if document := _json("squeue", *asked):
        if any(job.get("user_name", name) != name for job in document.get("jobs", ())):
            _without_json.add("squeue")  # too much to ask for every few seconds
        return read_json_queue(document, name)
    return read_queue(run("squeue", "--noheader", "--array", *asked, "--format=%i|%T|%r|%N|%j"))


def jobs_in_json(job_ids: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return the jobs with these ids that Slurm still has, as ``squeue --json`` writes them.

    Releases before 23.02 write everybody's.

    Raises:
        SlurmError: there is no answer, this release has no JSON, or it has none of the jobs.
    """
    asked = f"--jobs={','.join(job_ids)}"
    try:
        found = json.loads(run("squeue", "--json", "--states=all", asked))
    except ValueError:
        raise SlurmError("squeue --json printed no JSON") from None
    return list(found.get("jobs") or ()) if isinstance(found, dict) else []


def everybodys_queue() -> dict[str, Any]:
    """Return ``squeue --json``: the jobs that this user sees, also of others.

    Raises:
        SlurmError: there is no answer, or this release has no JSON.
    """
    try:
        found = json.loads(run("squeue", "--json"))
    except ValueError:
        raise SlurmError("squeue --json printed no JSON") from None
    return found if isinstance(found, dict) else {}


_without_json: set[str] = set()  # programs of the installed release


def _json(program: str, *arguments: str) -> dict[str, Any] | None:
    """Return a program's answer as JSON, None of a release or a build that has none.

    Raises:
        SlurmUnreachableError: Slurm does not answer.
    """
    if program in _without_json:
        return None
    try:
        document = json.loads(run(program, "--json", *arguments))
    except SlurmUnreachableError:
        raise
    except (SlurmError, ValueError) as error:
        log.info("%s has no JSON here: %s", program, error)
        _without_json.add(program)
        return None
    return document if isinstance(document, dict) else None


def read_json_queue(document: Mapping[str, Any], user: str) -> list[SlurmJob]:
    """Return our jobs of ``squeue --json``, which lists everybody's before Slurm 23.02.

    Later releases write a state as a list of its flags, and numbers with whether they are set.
    Tasks of an array that wait share one record.
    """
    return [
        SlurmJob(
            job_id,
            state_of(job["job_state"]),
            plain(str(job.get("state_reason") or "")),
            str(job.get("name") or ""),
            str(job.get("nodes") or ""),
        )
        for job in document.get("jobs", ())
        if job.get("user_name", user) == user and str(job.get("name") or "").startswith(PREFIX)
        for job_id in job_ids(job)
    ]


def job_ids(job: Mapping[str, Any]) -> list[str]:
    """Return a job's id; of an array's tasks, such as ``17_3``, all that the record is of."""
    array = plain_number(job.get("array_job_id"))
    if not array:
        return [str(plain_number(job["job_id"]))]
    waiting = list(indices(str(job.get("array_task_string") or "")))
    own = plain_number(job.get("array_task_id"))
    tasks: Sequence[object] = waiting or ([] if own is None else [own])
    return [f"{array}_{task}" for task in tasks]


def read_json_accounting(document: Mapping[str, Any]) -> SlurmJob | None:
    """Return the last job of ``sacct --json``: a requeued job is listed once per run."""
    jobs = document.get("jobs") or [None]
    if (job := jobs[-1]) is None:
        return None
    code = job.get("exit_code") or {}
    returned = plain_number(code.get("return_code") or 0)
    signalled = plain_number((code.get("signal") or {}).get("signal_id") or 0)
    return SlurmJob(
        str(plain_number(job["job_id"])),
        state_of((job.get("state") or {}).get("current")),
        f"{returned or 0}:{signalled or 0}",
        str(job.get("name") or ""),
        plain(str(job.get("nodes") or "")),
    )


def state_of(state: object) -> str:
    """Return a state, or the first of its flags."""
    return str(state[0] if isinstance(state, list) and state else state or "")


def plain_number(value: object) -> object:
    """Return a number; later releases write ``{"set": ..., "infinite": ..., "number": ...}``."""
    return value.get("number") if isinstance(value, dict) else value


def read_queue(text: str) -> list[SlurmJob]:
    """Return the jobs of squeue's output; malformed lines are skipped."""
    fields = [line.strip().split("|", NUM_FIELDS - 1) for line in text.splitlines()]
    return [
        SlurmJob(job_id, state, plain(reason), name, nodes)
        for job_id, state, reason, nodes, name in (
            each for each in fields if len(each) == NUM_FIELDS
        )
    ]


def plain(text: str) -> str:
    """Return one of Slurm's words, "" for its words for none."""
    return "" if text.strip("()") in {"", "None", "null"} else text.strip("()")


def ended_job(job_id: str) -> SlurmJob | None:
    """Return an ended job that squeue no longer lists, from sacct or else scontrol.

    Raises:
        SlurmUnreachableError: Slurm does not answer.
    """
    try:
        document = _json("sacct", "--allocations", f"--jobs={job_id}")
        if document and (job := read_json_accounting(document)):
            return job
        text = run(
            "sacct", "--allocations", "--noheader", "--parsable2", f"--jobs={job_id}",
            "--format=JobID,State,ExitCode,NodeList,JobName",
        )  # fmt: skip
        if job := read_accounting(text):
            return job
    except SlurmUnreachableError:
        raise
    except SlurmError:
        pass  # accounting is disabled here
    try:
        return read_control(run("scontrol", "show", "job", job_id, "--oneliner"))
    except SlurmUnreachableError:
        raise
    except SlurmError:
        return None  # Slurm no longer has a record of the job


def read_accounting(text: str) -> SlurmJob | None:
    """Return the last job of sacct's output: a requeued job has one line per run."""
    rows = [line.split("|", NUM_FIELDS - 1) for line in text.strip().splitlines()]
    rows = [row for row in rows if len(row) == NUM_FIELDS]
    if not rows:
        return None
    job_id, state, exit_code, nodes, name = rows[-1]
    return SlurmJob(job_id, state.split()[0].rstrip("+"), exit_code, name, plain(nodes))


def read_control(text: str) -> SlurmJob | None:
    """Return the job of ``scontrol show job --oneliner`` output, or None."""
    fields = read_fields(text)
    if "JobId" not in fields or "JobState" not in fields:
        return None
    return SlurmJob(
        fields["JobId"],
        fields["JobState"],
        fields.get("ExitCode", ""),
        fields.get("JobName", ""),
        plain(fields.get("NodeList", "")),
    )


def partitions() -> list[Partition]:
    """Return the cluster's partitions.

    Raises:
        SlurmError: there is no answer.
    """
    return read_partitions(run("sinfo", "--noheader", "--format=%R|%a|%l|%D|%c|%m|%G"))


def read_partitions(text: str) -> list[Partition]:
    """Return the partitions of sinfo's output, one per node type."""
    rows = [[word.strip() for word in line.split("|")] for line in text.splitlines()]
    return [
        Partition(
            name, state == "up", limit, int(nodes), cpus.rstrip("+"), memory.rstrip("+"),
            plain(gres),
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
