"""Commands that enrol a host, and the site's address in them."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from django.conf import settings
from django.http import HttpRequest

from runners.shared.addresses import in_url, is_loopback, own_addresses

PACKAGE = "'slipway[worker,gpu]'"
CLUSTERS = {"slurm", "kubernetes", "ray"}  # each has a page of the documentation
UNIT = "~/.config/systemd/user/slipway-host.service"


@dataclass(frozen=True)
class InstallCommand:
    """One tab: its name, the command, and a note about it."""

    key: str
    name: str
    command: str
    note: str

    @property
    def docs(self) -> str:
        """Return the page of the documentation about it, "" without one of its own."""
        return self.key if self.key in CLUSTERS else ""


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
            "Installs the agent in its own environment; slipway-host is then the command for "
            "everything else.",
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
        InstallCommand(
            "kubernetes",
            "Kubernetes",
            f"{python} {enroll} --kubernetes --image IMAGE --volume-claim CLAIM --mount-path PATH "
            f"--dir PATH/host && {python} work --dir PATH/host",
            "The agent runs in a pod, or anywhere with kubeconfig and the volume, and makes each "
            "job a Job of the cluster. IMAGE has this Python; CLAIM is a ReadWriteMany volume.",
        ),
        InstallCommand(
            "ray",
            "Ray cluster",
            f"{python} {enroll} --ray http://HEAD:8265 --gpus 1 --dir PATH/host "
            f"&& {python} work --dir PATH/host",
            "The agent runs on the head node or another machine that reaches the dashboard at "
            "HEAD, and makes each job a Ray job. PATH and this Python are seen by every node.",
        ),
    ]


def server_for_hosts(request: HttpRequest) -> tuple[str, bool]:
    """Return the site's address for a host, and whether only this machine can reach it.

    A browser on this machine, or at the end of an SSH tunnel, asks for a loopback name. If the
    site also answers at an address of the machine, as by ``up --host 0.0.0.0``, hosts get that.
    """
    server = request.build_absolute_uri("/").rstrip("/")
    if not is_loopback(urlsplit(server).hostname or ""):
        return server, False
    for own in map(in_url, own_addresses()):
        if own in settings.ALLOWED_HOSTS:
            return f"{request.scheme}://{own}:{request.META['SERVER_PORT']}", False
    return server, True
