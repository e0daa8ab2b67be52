"""Export a plan as a Slurm batch script: one task per node, the command under ``srun``."""

import shlex

from planner.exports.export import ExportCase, Format, Notes, shell_lines
from planner.exports.launch import (
    is_training,
    launch_arguments,
    launch_environment,
    launch_files,
    launch_notes,
    launch_script,
)

MARGIN = 1.2
NEWLINE = "\n"


def slurm_text(case: ExportCase) -> str:
    """Return the script for ``sbatch``."""
    environment = {"OMP_NUM_THREADS": "1", **launch_environment(case)}
    exports = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    written = [f"cat > {name} <<'END'\n{text}END" for name, text in launch_files(case).items()]
    head = 'MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"'
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH --{line}" for line in _directives(case)),
            "",
            *exports,
            f"export {head}",
            *written,
            _command(case),
        ]
    )


def _directives(case: ExportCase) -> list[str]:
    name = case.model.rstrip("/").rsplit("/", 1)[-1]
    lines = [
        f"job-name={name}-{case.workload.kind}",
        f"nodes={case.nodes}",
        "ntasks-per-node=1",
    ]
    if case.device.kind != "cpu":
        lines.append(f"gpus-per-node={case.devices_per_node}")
    lines.append("exclusive")
    seconds = case.plan.performance.duration_seconds
    if is_training(case) and seconds:
        high = case.plan.interval.get("duration_seconds", (seconds, seconds))[1]
        lines.append(f"time={_limit(high * MARGIN)}")
    return lines


def _limit(seconds: float) -> str:
    """Return a time limit as days-hours:minutes:seconds, rounded up to minutes.

    >>> _limit(93600)
    '1-02:00:00'
    """
    minutes = int(-(-seconds // 60))
    days, minutes = divmod(minutes, 24 * 60)
    return f"{days}-{minutes // 60:02}:{minutes % 60:02}:00"


def _command(case: ExportCase) -> str:
    script = launch_script(case)
    if script is None:
        return shell_lines(["srun", *launch_arguments(case)])
    # The rank exists only in the task, so the task's shell expands it.
    return f"srun bash -c {shlex.quote('NODE_RANK=$SLURM_NODEID' + NEWLINE + script)}{NEWLINE}"


def slurm_notes(case: ExportCase) -> Notes:
    """Return what the script leaves open."""
    notes = ["add the partition and the account of your cluster"]
    if case.plan.performance.duration_seconds is None or not is_training(case):
        notes.append("no time limit: the plan does not say how long it runs")
    return (*notes, *launch_notes(case))


SLURM = Format("slurm", "Slurm", "job.sbatch", slurm_text, slurm_notes)
