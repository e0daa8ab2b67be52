"""Run one training attempt."""

from runners.jobs.runtime import Job, run_job
from runners.jobs.tracking import tracked
from runners.jobspec import TrainSpec
from runners.jobspec.objectives import TRL


def work(job: Job) -> None:
    """Train by the engine of the spec; TRL is in its own environment alone."""
    spec = job.spec_of(TrainSpec)
    if spec.engine == TRL:
        from runners.jobs.train.trl.job import work as train
    else:
        from runners.jobs.train.job import work as train
    with tracked(job, spec.tracker, spec.model_dump(exclude={"secrets", "tracker"})):
        train(job)


if __name__ == "__main__":
    run_job("train", work)
