"""Selects the launcher from the host's configuration."""

from runners.config import HostConfig
from runners.launchers.base import Launcher
from runners.launchers.local import LocalLauncher
from runners.launchers.slurm import SlurmLauncher


def launcher(config: HostConfig, boot_id: str) -> Launcher:
    """Return the launcher of a host."""
    return SlurmLauncher(config.slurm) if config.slurm else LocalLauncher(boot_id)
