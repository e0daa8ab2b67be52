"""How a plan is launched: what is started, for how long, and the options of its program."""

import shlex
from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field

from planner.specs.units import HOUR, MINUTE
from runners.jobspec.base import LONGEST_NAME, NAME_LENGTH, SchedulerOption
from runners.jobspec.engine_args import MOST_WORDS, Word, engines_with_arguments
from runners.jobspec.engines import (
    ENGINES,
    OWN,
    ROWS,
    EngineName,
    needing_gpu,
    titles,
    with_feature,
)
from runners.jobspec.trackers import TRACKERS, TrackerName
from runners.plans.fields import Part, field

Run = Literal["job", "endpoint", "load", "evaluation"]
MAX_SECRETS = 16
ENGINES_HINT = (
    f"{titles(each for each in ROWS if each.environment)} run in environments of their own; the "
    "host builds one first where it is missing. Only hosts with a GPU offer "
    f"{titles(needing_gpu())}."
)
PREFIX_CACHING_HINT = (
    f"Only {titles(with_feature('prefix_caching'))} support this option. "
    + "; ".join(f"{each.title} {each.prompt_reuse}" for each in ROWS if each.prompt_reuse)
    + "."
)


ENGINE_ARGS_HINT = (
    "As a shell takes them, of "
    f"{titles((ENGINES[each] for each in engines_with_arguments()), 'or')}; checked "
    "against the release that runs, and what the plan sets is refused"
)


def shell_words(value: object) -> object:
    """Return a text as a shell's words; other types unchanged.

    Raises:
        ValueError: a quote is not closed.
    """
    if not isinstance(value, str):
        return value
    try:
        return shlex.split(value)
    except ValueError as error:
        msg = f"{value[:60]!r} cannot be read as a shell would: {error}; close the quote"
        raise ValueError(msg) from error


EngineArgs = Annotated[
    list[Word], BeforeValidator(shell_words, json_schema_input_type=list[Word] | str)
]


SchedulerName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:@+-]{0,100}$")]


class Launch(Part):
    """What is started of a plan; an option that the launch does not use is refused."""

    run: Run = field(
        "job",
        "Run",
        "Of a plan to serve: its benchmark, its endpoint, or a load test. Of a plan to generate: "
        "its batch, or an evaluation of its model on held-out text",
    )
    name: str = field("", "Name", "Name of the job and of the plan", max_length=NAME_LENGTH)
    save_as: Literal["next", "new"] = field(
        "next",
        "Save this draft as",
        "The next version of the plan it came from, or a new plan",
        choices={"next": "the next version", "new": "a separate plan"},
    )
    max_duration_seconds: float | None = field(
        None,
        "Time limit, in hours",
        "Empty: as planned.",
        factor=HOUR,
        ge=36.0,
        le=8784 * HOUR,
    )
    max_retries: int = field(
        0,
        "Retries after a host failure",
        "As a new attempt, which resumes from the last checkpoint on that host. A failure caused "
        "by the job itself, such as too little memory, is never retried.",
        choices={0: "No", 1: "Once", 2: "Twice", 3: "Three times"},
        ge=0,
        le=5,
    )
    priority: Literal["normal", "low"] = field(
        "normal", "Priority", choices={"normal": "Normal", "low": "Low: after the others"}
    )
    shared: bool | None = field(
        None,
        "Share the device",
        "With other jobs that share it, by the memory that their plans need; they slow each "
        "other down. As usual: deployments share, other jobs do not. Of a plan for one device",
        choices={None: "As usual", True: "Yes", False: "No"},
    )
    secrets: list[Annotated[str, Field(max_length=40)]] = field(
        [],
        "Secrets for the job",
        "Names of the team's secrets",
        max_length=MAX_SECRETS,
    )
    tracker: TrackerName | None = field(
        None,
        "Experiment tracker",
        "Of a training: its metrics are also written by the tracker's own library, which the host "
        "fetches into an environment of its own. A key is a secret of the team that the job gets: "
        f"{' or '.join(each.secret for each in TRACKERS.values() if each.secret)}",
        choices={None: "No tracker", **{name: each.title for name, each in TRACKERS.items()}},
    )
    tracker_project: str = field("", "Project", "Of the tracker; empty: slipway", max_length=120)
    tracker_run: str = field("", "Run name", "Of the tracker; empty: the job's id", max_length=120)
    tracker_url: str = field(
        "",
        "Tracker's address",
        "Of an MLflow server, without which files of the job are written, or of a Weights & "
        "Biases server other than its own; without its key it writes files, too",
        max_length=500,
    )
    partition: SchedulerName = field(
        "",
        "Partition",
        "Of a Slurm host; of a Ray host a kind of nodes, such as H100; empty: the host's own",
    )
    account: SchedulerName = field(
        "", "Account", "Whom Slurm charges for the job; empty: the host's own"
    )
    qos: SchedulerName = field("", "QOS", "Quality of service in Slurm; empty: the host's own")
    reservation: SchedulerName = field(
        "", "Reservation", "Slurm's nodes that are kept for some users; empty: none"
    )
    queue: SchedulerName = field(
        "", "Queue", "Of a Kubernetes host with Kueue: a LocalQueue; empty: the host's own"
    )
    priority_class: SchedulerName = field(
        "", "Priority class", "Of the pods on a Kubernetes host; empty: the host's own"
    )
    weights: Literal["published", "random"] = field(
        "published",
        "Weights",
        "Random ones in the model's shape are not downloaded: speed and memory are real, the text "
        "is not.",
        choices={
            "published": "Published ones",
            "random": "Random numbers",
        },
    )
    original: str = field(
        "",
        "Compared with",
        "Of an evaluation: the repository of another model with the same tokenizer, as "
        "owner/name; “@” and a branch or commit may follow. Empty: the model alone",
        max_length=LONGEST_NAME,
    )
    engine: EngineName = field(OWN, "Engine", ENGINES_HINT)
    idle_stop_seconds: float | None = field(
        None,
        "Stop when idle, after minutes",
        "Empty: until somebody stops it.",
        factor=MINUTE,
        ge=6.0,
        le=10_080 * MINUTE,
    )
    prefix_caching: bool | None = field(
        None,
        "Prefix caching",
        PREFIX_CACHING_HINT,
        choices={None: "Engine default", True: "Yes", False: "No"},
    )
    draft_model: str = field(
        "",
        "Speculative decoding",
        "The output stays the same; accepted draft tokens save passes. A model of the team by its "
        "id, or “lookup” for prompt lookup",
        max_length=40,
    )
    engine_args: EngineArgs = field(
        [],
        "Further engine arguments",
        ENGINE_ARGS_HINT,
        is_command_line=True,
        max_length=MOST_WORDS,
    )
    adapters: bool = field(
        default=False,
        title="With the adapters that your team's jobs trained on this model",
        help="Each has a model name of its own",
    )
    adapter: str = field(
        "",
        "Adapter of your team",
        "Of a generation; “all”: the adapter named in each line of the prompts file",
        max_length=200,
    )
    profile: bool = field(
        default=False,
        title="Also profile the operators",
        help="Time of each operator in prefill and decode",
    )
    arrivals: Literal["closed", "open", "burst"] = field(
        "closed",
        "Arrivals",
        "How the clients of a load test send requests",
        choices={
            "closed": "Closed loop: each client sends its next request once answered",
            "open": "Open loop: random arrivals, requests per second",
            "burst": "Burst: all requests of a load level sent at once",
        },
    )
    levels: Literal["given", "search"] = field(
        "given",
        "Choice of levels",
        "A search begins at what the plan predicts, and doubles, halves and bisects until the "
        "limit is known within 7 %; at most 12 measurements.",
        choices={
            "given": "The load levels that are given",
            "search": "Search for the highest load that meets the latency target",
        },
    )
    max_search_seconds: float = field(
        HOUR,
        "Time limit of a search, in minutes",
        "No level begins that is expected to end later.",
        factor=MINUTE,
        ge=MINUTE,
        le=24 * HOUR,
    )
    points: list[Annotated[float, Field(gt=0)]] = field(
        [],
        "Load levels",
        "Numbers of clients, requests a second, or requests at once; rising, at most 12.",
        max_length=12,
    )
    requests_per_repetition: int = field(
        32,
        "Requests per repetition",
        "A p99 needs a thousand requests in total.",
        ge=1,
        le=100_000,
    )
    repetitions: int = field(
        3,
        "Repetitions",
        "Each uses different prompts; their spread gives the interval.",
        ge=1,
        le=20,
    )

    @property
    def scheduler_options(self) -> dict[SchedulerOption, str]:
        """Return what the job asks of its host's scheduler."""
        return {
            name: value for name in get_args(SchedulerOption) if (value := getattr(self, name))
        }


# What options of a launch are for: of a plan to serve its run, of another plan its goal.
USED_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("engine", "idle_stop_seconds", "prefix_caching", "adapters", "engine_args"), ("endpoint",)
    ),
    "weights": ("job", "generate"),
    "draft_model": ("endpoint", "generate"),
    "adapter": ("generate",),
    "original": ("evaluation",),
    "profile": ("job",),
    **dict.fromkeys(
        ("tracker", "tracker_project", "tracker_run", "tracker_url"), ("finetune", "pretrain")
    ),
    **dict.fromkeys(("arrivals", "levels", "max_search_seconds", "points"), ("load",)),
    **dict.fromkeys(("requests_per_repetition", "repetitions"), ("load",)),
}
RUN_WORDS = {
    "job": "the benchmark of a plan to serve (run “job”)",
    "endpoint": "the endpoint of a plan to serve (run “endpoint”)",
    "load": "the load test of a plan to serve (run “load”)",
    "generate": "a batch generation",
    "evaluation": "the evaluation of a plan to generate (run “evaluation”)",
    "compress": "a compression",
    "pretrain": "a pre-training",
    "finetune": "a fine-tuning",
}


EVALUATION = ("generate", "evaluation")  # goal and run


class LaunchOptionError(ValueError):
    """An option that a launch would not use, or cannot; ``name`` is its field."""

    def __init__(self, name: str, sentence: str) -> None:
        super().__init__(sentence)
        self.name = name


def kind_of(goal: str, run: str = "job") -> str:
    """Return what a launch starts, in the words of ``USED_BY``: a run of serving, or a goal."""
    return run if goal == "serve" or (goal, run) == EVALUATION else goal


def check_used(goal: str, launch: Launch) -> None:
    """Refuse options that a launch would not use.

    Raises:
        LaunchOptionError: an option belongs to another goal or run; its text names the way out.
    """
    is_serving = goal == "serve" and launch.run != "evaluation"
    if launch.run != "job" and not is_serving and (goal, launch.run) != EVALUATION:
        own = "a plan to serve" if goal == "serve" else RUN_WORDS[goal]
        raise LaunchOptionError(
            "run",
            f"The field run is {launch.run!r}, which is of {RUN_WORDS[launch.run]}; this plan is "
            f"{own}. Leave run out.",
        )
    kind = kind_of(goal, launch.run)
    for name in launch.model_dump(exclude_defaults=True):
        kinds = USED_BY.get(name, (kind,))
        if kind not in kinds:
            words = " or ".join(RUN_WORDS[each] for each in kinds)
            raise LaunchOptionError(
                name,
                f"The field {name} is of {words}, and this launch is {RUN_WORDS[kind]}, which "
                "would not use it. Leave it out.",
            )
