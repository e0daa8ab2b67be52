"""What schedulers call what a host reports of them: a row each; pages and checks read it."""

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from runners.jobspec.base import SchedulerKind


class SchedulerTerms(NamedTuple):
    """A scheduler's words for its parts, and how a host's options of it name GPUs.

    ``checks_values``: it refuses an unknown value of an option itself, by the agent's user.
    ``gpus_per_node``: how many GPUs the options give a job on a node; 0: they do not say.
    """

    title: str
    submits: str  # how a job gets there, up to the term that follows
    submits_term: str
    partitions: str
    agent_place: str  # where the agent runs
    partition_down: str  # what is said of one that takes no job
    checks_values: bool
    has_classes_of_nodes: bool  # partitions are kinds of nodes, counted where a job fits
    gpus_per_node: Callable[[Mapping[str, str]], int]
    gpus_setting: str  # of config.json
    gpus_value: str  # of that setting, with {gpus}
    gpus_argument: str  # of the options as they are, with {gpus} and {value} of the setting


def gpus_of_gres(gres: str) -> int:
    """Return how many GPUs a list of generic resources names.

    >>> gpus_of_gres("tmpdisk:9,gpu:h100:4(S:0-1),gpu:2"), gpus_of_gres("gpu"), gpus_of_gres("")
    (6, 1, 0)
    """
    plain = re.sub(r"\([^)]*\)", "", gres)  # which sockets they are on
    named = [each.split(":") for each in plain.split(",")]
    return sum(
        int(words[-1]) if words[-1].isdigit() else 1 for words in named if words[0] == "gpu"
    )


def _gpus_of_resources(options: Mapping[str, str]) -> int:
    """Return the GPUs of a pod's extended resources, whose names alone have a domain.

    An agent may report any text, and one that is no number says nothing.
    """
    told = [value for name, value in options.items() if "/" in name]
    return sum(int(value) for value in told if re.fullmatch(r"[0-9]{1,6}", value))


def _gpus_stated(options: Mapping[str, str]) -> int:
    """Return the number under ``gpus``; 0 where it is none, as an agent may report any text."""
    told = options.get("gpus", "")
    return int(told) if re.fullmatch(r"[0-9]{1,6}", told) else 0


# Kubernetes checks no value: a Job waits forever in a queue that is not there, and every priority
# class is free to every account; Ray's Job waits for a kind of nodes that is not there.
SCHEDULER_TERMS: Mapping[SchedulerKind, SchedulerTerms] = {
    "slurm": SchedulerTerms(
        title="Slurm",
        submits="jobs are submitted with",
        submits_term="sbatch",
        partitions="Partitions",
        agent_place="Login node",
        partition_down="down",
        checks_values=True,
        has_classes_of_nodes=False,
        gpus_per_node=lambda options: gpus_of_gres(options.get("gres", "")),
        gpus_setting="gres",
        gpus_value="gpu:{gpus}",
        gpus_argument="--gres={value}",
    ),
    "kubernetes": SchedulerTerms(
        title="Kubernetes",
        submits="each job is a",
        submits_term="Job",
        partitions="Nodes",
        agent_place="Agent",
        partition_down="down",
        checks_values=False,
        has_classes_of_nodes=False,
        gpus_per_node=_gpus_of_resources,
        gpus_setting="gpus",
        gpus_value="{gpus}",
        gpus_argument="--gpus {gpus}",
    ),
    "ray": SchedulerTerms(
        title="Ray",
        submits="each job is a Ray job with a",
        submits_term="placement group",
        partitions="Nodes",
        agent_place="Agent",
        partition_down="less than a job takes",
        checks_values=False,
        has_classes_of_nodes=True,
        gpus_per_node=_gpus_stated,
        gpus_setting="gpus",
        gpus_value="{gpus}",
        gpus_argument="--gpus {gpus}",
    ),
}
