"""What a host says of the Slurm cluster to which it hands its jobs."""

from runners.launchers import slurm_commands
from runners.launchers.slurm_commands import SlurmError
from runners.scheduler_messages import PartitionFacts, SchedulerFacts
from runners.slurm_options import SlurmConfig

MAX_PARTITIONS = 256


def scheduler_facts(config: SlurmConfig) -> SchedulerFacts:
    """Return what sinfo tells, and what jobs of this host ask for; a silent Slurm is said."""
    said = SchedulerFacts(
        options=config.options,
        time_limit_minutes=config.time_limit_minutes,
        max_jobs=config.max_jobs,
    )
    try:
        found = slurm_commands.partitions()
        version = slurm_commands.version()
    except SlurmError as error:
        return said.model_copy(update={"problem": str(error)})
    listed = tuple(PartitionFacts(**each._asdict()) for each in found[:MAX_PARTITIONS])
    return said.model_copy(update={"version": version, "partitions": listed})
