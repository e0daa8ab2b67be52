"""Every layout that is searched for a training runs: as a job of the host, or by an export."""

import itertools

import pytest

from planner.exports.format_support import OWN_METHODS, formats_for
from planner.search.engine import blocks_of
from planner.search.question import questions
from planner.search.training_space import training_blocks
from planner.specs.estimate import PlanRequest
from runners.jobspec import FolderModel, TrainSpec
from runners.jobspec.base import LoraOptions
from tests.planner.asking import LLAMA_8B, MIXTRAL, TRAIN, document
from webapp.plans.training import STATE_PLACES, layout_of

CASES = [
    ("full", None),
    ("full", "adamw_8bit"),
    ("full", "sgd"),
    ("lora", None),
    ("qlora", None),
    ("qft", None),
    ("lomo", None),
]
EVERY = list(itertools.product(CASES, (LLAMA_8B, MIXTRAL)))
MOST = 64  # strategies of a block: its layouts differ most at its start


def asked(engine, case, model):
    method, optimizer = case
    workload = {**TRAIN, "global_batch_size": 4, "method": method, "optimizer": optimizer}
    fields = {"engine": engine, "devices": 4, "model": model, "workload": workload}
    question = next(questions(PlanRequest.model_validate(document(**fields))))
    last = training_blocks(question, question.request.workload, last_resort=True)
    return question, [
        block.strategy(row)
        for block in (*blocks_of(question), *last)
        for row in range(len(block.cells[:MOST]))
    ]


def run_by_trainer(strategy, case):
    """Return the job of a layout; it raises where the trainer refuses it."""
    method, optimizer = case
    adapters = LoraOptions(base_dtype="nf4" if method == "qlora" else "compute")
    offload = strategy.offload.optimizer if strategy.offload else "none"
    return TrainSpec(
        model=FolderModel(path="model"),
        gradient_accumulation_steps=strategy.data_parallel_size if method == "full" else 1,
        optimizer=optimizer or (method if method in {"lomo", "qft"} else "adamw"),
        lora=adapters if "lora" in method else None,
        optimizer_offload=STATE_PLACES[offload],
        layout=layout_of(strategy),
    )


@pytest.mark.parametrize(("case", "model"), EVERY)
def test_what_is_searched_for_slipways_trainer_is_a_job_of_it(case, model):
    _, strategies = asked("torch", case, model)

    assert strategies
    for strategy in strategies:
        run_by_trainer(strategy, case)


@pytest.mark.parametrize("engine", [None, "transformers", "deepspeed"])
@pytest.mark.parametrize(("case", "model"), EVERY)
def test_what_is_searched_otherwise_is_a_job_or_an_export(engine, case, model):
    question, strategies = asked(engine, case, model)
    if engine is not None and case[0] in OWN_METHODS:
        return  # a tool without the method: what it would take is costed all the same

    for strategy in strategies:
        if not formats_for(question.case, strategy, engine):
            assert engine is None
            run_by_trainer(strategy, case)
