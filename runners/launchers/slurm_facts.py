"""The facts about its Slurm cluster that a host reports."""

from runners.launchers import slurm_commands
from runners.launchers.slurm_commands import SlurmError
from runners.scheduler_messages import PartitionFacts, SchedulerFacts
from runners.slurm_options import SlurmConfig

MAX_PARTITIONS = 256


def scheduler_facts(config: SlurmConfig) -> SchedulerFacts:
    """Return the cluster's partitions and this host's job options; on failure the problem."""
    facts = SchedulerFacts(
        options=config.options,
        time_limit_minutes=config.time_limit_minutes,
        max_jobs=config.max_jobs,
    )
    try:
        partitions = slurm_commands.partitions()
        version = slurm_commands.version()
    except SlurmError as error:
        return facts.model_copy(update={"problem": str(error)})
    partition_facts = tuple(
        PartitionFacts(**each._asdict()) for each in partitions[:MAX_PARTITIONS]
    )
    return facts.model_copy(update={"version": version, "partitions": partition_facts})
