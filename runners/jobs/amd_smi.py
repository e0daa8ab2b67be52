"""GPU figures from inside the job on AMD GPUs, through amdsmi."""

from runners.devices import amd
from runners.jobs.energy import Sample


def visible_sample() -> Sample | None:
    """Return a sampler of this process's visible GPUs, or None without amdsmi or GPU."""
    library = amd.initialised()
    if library is None or not list(amd.loads(library)):
        return None

    def sample() -> dict[str, float]:
        values: dict[str, float] = {}
        for index, load in enumerate(amd.loads(library)):
            values[f"gpu{index}_memory_bytes"] = float(load.memory_used_bytes)
            values[f"gpu{index}_utilization"] = load.utilization
            if load.power_watts is not None:
                values[f"gpu{index}_power_watts"] = load.power_watts
        return values

    return sample
