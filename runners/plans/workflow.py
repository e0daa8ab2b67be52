"""The document of a workflow: steps, each of which starts from the model that the last one made.

A step is a plan's document, or the evaluation of a model. The first one names a model; each later
one has that of the last step before it which makes one. A step with a ``sweep`` is a job for each
combination of the values, and the step after it takes the best of their models.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from planner.specs.base import refuse
from runners.jobspec.base import NAME_LENGTH
from runners.jobspec.compress import EvaluationTasks
from runners.plans.document import (
    GOALS,
    PLANS,
    CompressPlan,
    FinetunePlan,
    GeneratePlan,
    PlanDocument,
    PretrainPlan,
    ServePlan,
)
from runners.plans.fields import Part, field
from runners.plans.methods import COMPRESSIONS
from runners.plans.refusals import first_message
from runners.plans.workloads import TRAINING_GOALS

MOST_STEPS = 8
MOST_VARIANTS = 16
EVALUATE = "evaluate"
SWEPT_PARTS = ("workload", "pins", "hardware", "launch")
MAKES_MODEL = TRAINING_GOALS | {"compress"}
EVALUATES_NONE = (
    "An evaluation measures the model that a step before it made. Begin with a step that makes "
    "one: finetune, pretrain or compress"
)
MAKES_NONE = (
    "It makes no model to go on with. Begin with finetune, pretrain or compress, or start it as a "
    "job of its own"
)
ENDLESS = "An endpoint runs until somebody stops it. Let it be the last step"
COMPRESSED_BEFORE = (
    "reads 16-bit weights, and a step before it compresses them. Put it before the compression"
)
GGUF_BEFORE = (
    "reads safetensors, and a step before it writes a GGUF file, which is evaluated as it is "
    "written. Leave it out, or choose another method"
)
MIXES_GGUF = (
    "The next step takes the best of its models, and only some of them would be GGUF files. Try "
    "the method gguf in a workflow of its own"
)
STEP_TITLES: Mapping[str, str] = {
    **{goal: title for goal, (title, _) in GOALS.items()},
    EVALUATE: "Evaluate",
}


class EvaluateStep(Part):
    """Measure the model that the last step made, beside the one which that started from."""

    goal: Annotated[Literal["evaluate"], Field(description="What is done with the model")]
    name: str = field("", "Name", "Left out: named by its model", max_length=NAME_LENGTH)
    tasks: EvaluationTasks | None = Field(
        default=None,
        description="Besides the perplexity on held-out text: files of tasks on the host",
    )


SWEEP: Any = Field(
    default={},
    description="Values to try of some fields, each by its path: "
    '{"workload.learning_rate": [1e-4, 3e-4]}. Every combination is a job of its own; '
    f"{MOST_VARIANTS} at most",
    max_length=4,
)
Sweep = dict[
    Annotated[str, Field(pattern=r"^[a-z]+\.[a-z_]+$", max_length=120)],
    Annotated[
        list[str | int | float | bool | None], Field(min_length=1, max_length=MOST_VARIANTS)
    ],
]


class ServeStep(ServePlan):
    """Answer requests as they arrive."""

    sweep: Sweep = SWEEP


class GenerateStep(GeneratePlan):
    """Process a batch of prompts at the highest throughput."""

    sweep: Sweep = SWEEP


class FinetuneStep(FinetunePlan):
    """Train an existing model on your own text."""

    sweep: Sweep = SWEEP


class PretrainStep(PretrainPlan):
    """Train a model from random weights."""

    sweep: Sweep = SWEEP


class CompressStep(CompressPlan):
    """Make the weights smaller and measure the loss of quality."""

    sweep: Sweep = SWEEP


PlanStep = ServeStep | GenerateStep | FinetuneStep | PretrainStep | CompressStep
AnyStep = Annotated[PlanStep | EvaluateStep, Field(discriminator="goal")]


class WorkflowDocument(Part):
    """Steps that follow one another, each with the model that the last one made."""

    name: str = field("", "Name", "Left out: named by its steps", max_length=NAME_LENGTH)
    steps: list[AnyStep] = Field(
        min_length=1,
        max_length=MOST_STEPS,
        description="The first is a plan's document and names a model; each later one leaves the "
        "model out, and the hardware unless it is the same",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for path, sentence in _faults(self.steps):
            refuse(path, f"{sentence}.")
        return self

    @property
    def title(self) -> str:
        """Return the name, or what is done in the steps' order."""
        if self.name:
            return self.name
        titles = [STEP_TITLES[each.goal].lower() for each in self.steps]
        words = ", ".join(titles[:-1]) + " and " + titles[-1] if len(titles) > 1 else titles[0]
        return words[0].upper() + words[1:]


def _faults(steps: list[PlanStep | EvaluateStep]) -> Iterator[tuple[str, str]]:
    """Yield what is wrong in the order of the steps: the path of a field, and a sentence."""
    methods: set[str] = set()  # of the compressions before
    for position, step in enumerate(steps):
        is_last = position == len(steps) - 1
        faults = _first_faults(step) if not position else _later_faults(step, methods)
        if not is_last and not any(each.goal in MAKES_MODEL for each in steps[: position + 1]):
            faults.append(("goal", MAKES_NONE))
        if isinstance(step, PlanStep):
            jobs, of_sweep = _jobs_of(step, is_last=is_last)
            faults += [("sweep", each) for each in of_sweep]
            if not step.sweep and not is_last and any(map(_is_endpoint, jobs)):
                faults.append(("launch.run", ENDLESS))
            methods |= _methods(jobs)
        yield from ((f"steps.{position}.{name}", sentence) for name, sentence in faults)


def _first_faults(step: PlanStep | EvaluateStep) -> list[tuple[str, str]]:
    is_evaluation = isinstance(step, EvaluateStep)
    return [("goal", EVALUATES_NONE)] if is_evaluation else []


def _later_faults(step: PlanStep | EvaluateStep, methods: Set[str]) -> list[tuple[str, str]]:
    """Return what is wrong in a later step; ``methods``: of the compressions before it."""
    faults = []
    if "model" in step.model_fields_set:
        faults.append(("model", "It is the model that the last step made. Leave it out"))
    if step.goal == "pretrain":
        faults.append(("goal", "A pre-training starts from random weights. Put it first"))
    if methods and step.goal in MAKES_MODEL:
        faults.append(("goal", f"{STEP_TITLES[step.goal]} {COMPRESSED_BEFORE}"))
    if "gguf" in methods and step.goal in {EVALUATE, "generate"}:
        faults.append(("goal", f"{STEP_TITLES[step.goal]} {GGUF_BEFORE}"))
    return faults


def _jobs_of(step: PlanStep, *, is_last: bool) -> tuple[list[PlanDocument], list[str]]:
    """Return the documents of a step's jobs, and what is wrong with its sweep."""
    if not step.sweep:
        return [step], []
    faults = list(_sweep_faults(step))
    if faults:
        return [], faults
    jobs = []
    for values in variants_of(step):
        try:
            jobs.append(PLANS[step.goal].model_validate(document_of_variant(step, values)))
        except ValidationError as error:
            return [], [f"{_in_words(values)}: {first_message(error)}"]
    if any(map(_is_endpoint, jobs)):
        faults.append("Endpoints run until they are stopped. Sweep its benchmark: run “job”")
    if not is_last and step.goal not in MAKES_MODEL:
        faults.append("It makes no model to go on with. Let it be the last step")
    methods = _methods(jobs)
    if not is_last and "gguf" in methods and len(methods) > 1:
        faults.append(MIXES_GGUF)
    return jobs, faults


def _methods(jobs: Sequence[PlanDocument]) -> set[str]:
    """Return the methods of the jobs that compress, as a job names them."""
    found = [each.workload.method for each in jobs if isinstance(each, CompressPlan)]
    return {COMPRESSIONS[method].job for method in found}


def _is_endpoint(job: PlanDocument) -> bool:
    return job.goal == "serve" and job.launch.run == "endpoint"


def _in_words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{path}={value}" for path, value in values.items())


def _sweep_faults(step: PlanStep) -> Iterator[str]:
    count = math.prod(map(len, step.sweep.values()))
    if count > MOST_VARIANTS:
        yield (
            f"Its values make {count} combinations, and {MOST_VARIANTS} can be tried. "
            "Leave values out"
        )
    for path in step.sweep:
        part, name = path.split(".")
        known = type(getattr(step, part)).model_fields if part in SWEPT_PARTS else {}
        if name not in known:
            yield (
                f"{path} is no field of a {step.goal} step that can vary. Name one of "
                f"{', '.join(SWEPT_PARTS)}, such as workload.learning_rate"
            )


def variants_of(step: PlanStep | EvaluateStep) -> list[dict[str, Any]]:
    """Return the values of each job of a step, by their paths; one empty row without a sweep.

    >>> step = FinetuneStep(goal="finetune", sweep={"workload.lora_rank": [8, 16]})
    >>> variants_of(step)
    [{'workload.lora_rank': 8}, {'workload.lora_rank': 16}]
    """
    if isinstance(step, EvaluateStep) or not step.sweep:
        return [{}]
    rows = itertools.product(*step.sweep.values())
    return [dict(zip(step.sweep, row, strict=True)) for row in rows]


def document_of_variant(step: PlanStep, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a step states as a plan's document, with the values of one job of its sweep."""
    document = step.model_dump(mode="json", exclude_unset=True)
    document.pop("sweep", None)
    for path, value in values.items():
        part, name = path.split(".")
        document.setdefault(part, {})[name] = value
    return document
