"""What may be asked of Slurm: a closed list, whoever asks for it."""

import argparse

import pytest
from pydantic import ValidationError

from runners import slurm_options
from runners.slurm_options import SlurmArgumentError, SlurmConfig


def read(*arguments: str) -> SlurmConfig | None:
    parser = argparse.ArgumentParser()
    slurm_options.add(parser)
    return slurm_options.read(parser.parse_args(arguments))


def test_without_slurm_a_host_runs_its_jobs_itself():
    assert read() is None


def test_named_and_other_options_become_those_of_every_job():
    found = read("--slurm", "--partition", "gpu", "--gres", "gpu:1", "--slurm-option", "mem=8G")

    assert found.argv() == ["--gres=gpu:1", "--mem=8G", "--partition=gpu"]


def test_limits_are_taken_over():
    found = read("--slurm", "--time-limit-minutes", "90", "--max-jobs", "4")

    assert (found.time_limit_minutes, found.max_jobs) == (90, 4)


@pytest.mark.parametrize("name", ["wrap", "export", "output", "chdir", "uid", "prolog", "signal"])
def test_an_option_that_names_a_program_or_a_file_is_refused(name):
    with pytest.raises(SlurmArgumentError, match=f"--{name} is not among the options allowed"):
        read("--slurm", "--slurm-option", f"{name}=x")


@pytest.mark.parametrize("value", ["a b", "a;b", "$(id)", "a\nb", "`id`", "'", ""])
def test_a_value_that_means_something_to_a_shell_is_refused(value):
    with pytest.raises(ValidationError, match="is no value of that option"):
        SlurmConfig(options={"partition": value})


def test_an_option_without_a_value_is_refused():
    with pytest.raises(SlurmArgumentError, match="not of the form NAME=VALUE"):
        read("--slurm", "--slurm-option", "mem")


def test_options_of_slurm_alone_are_not_ignored_elsewhere():
    with pytest.raises(SlurmArgumentError, match="partition: these hold for Slurm alone"):
        read("--partition", "gpu")


def test_a_number_of_jobs_that_makes_no_sense_names_the_field():
    with pytest.raises(SlurmArgumentError, match=r"max_jobs: .*greater than or equal to 1"):
        read("--slurm", "--max-jobs", "0")
