"""Every layout that is searched for a training runs: as a job of the host, or by an export."""

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
MOST = 64  # strategies of a block: its layouts differ most at its start


def searched(engine, case, model):
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


@pytest.mark.parametrize("model", [LLAMA_8B, MIXTRAL])
def test_what_is_searched_for_slipways_trainer_is_a_job_of_it(model):
    for case in CASES:
        _, strategies = searched("torch", case, model)
        assert strategies, case
        for strategy in strategies:
            run_by_trainer(strategy, case)


@pytest.mark.parametrize("engine", [None, "transformers", "deepspeed"])
@pytest.mark.parametrize("model", [LLAMA_8B, MIXTRAL])
def test_what_is_searched_otherwise_is_a_job_or_an_export(engine, model):
    """A tool that lacks the method is not asked: what it would take is costed all the same."""
    for case in CASES:
        question, strategies = searched(engine, case, model)
        if engine is not None and case[0] in OWN_METHODS:
            continue
        for strategy in strategies:
            if not formats_for(question.case, strategy, engine):
                assert engine is None, (case, strategy)
                run_by_trainer(strategy, case)
