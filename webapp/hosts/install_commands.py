"""Enrolment commands of a host: for pip, pipx, systemd and a Slurm login node."""

from dataclasses import dataclass

PACKAGE = "'slipway[worker,gpu]'"
UNIT = "~/.config/systemd/user/slipway-host.service"


@dataclass(frozen=True)
class InstallCommand:
    """One tab: its name, the command, and a note about it."""

    key: str
    name: str
    command: str
    note: str


def install_commands(server: str, token: str) -> list[InstallCommand]:
    """Return the command of every installation method, ready to paste."""
    enroll = f"enroll --server {server} --token {token}"
    python = "python -m runners"
    return [
        InstallCommand(
            "pip",
            "pip",
            f"{python} {enroll} && {python} work",
            f"Needs Python 3.11 and pip install {PACKAGE}, or a checkout of this repository.",
        ),
        InstallCommand(
            "pipx",
            "pipx",
            f"pipx install {PACKAGE} && slipway-host {enroll} && slipway-host work",
            "An environment of its own; slipway-host is then the command for all else.",
        ),
        InstallCommand(
            "systemd",
            "systemd",
            f"{python} {enroll} && mkdir -p {UNIT.rpartition('/')[0]} && {python} unit > {UNIT} "
            "&& loginctl enable-linger && systemctl --user enable --now slipway-host",
            "Starts with the machine, as your own user. Jobs outlive a restart of the service. "
            "Review the unit first with python -m runners unit.",
        ),
        InstallCommand(
            "slurm",
            "Slurm login node",
            f"{python} {enroll} --slurm --partition gpu --gres gpu:1 && {python} work",
            "The agent stays on the login node and hands each job to Slurm with sbatch. Name your "
            "own partition and what a job gets of a node. The home folder must be shared.",
        ),
    ]
