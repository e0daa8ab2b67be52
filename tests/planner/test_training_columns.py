"""Training layouts: grids cost what each layout costs alone; what ranks send each other."""

import itertools
from dataclasses import replace
from functools import cache
from operator import itemgetter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.quantity import Ledger, NullLedger
from planner.cost.training import zero_bubble_divisor
from planner.search.engine import blocks_of
from planner.search.question import questions
from planner.search.scoring import FitCheck
from planner.search.training_space import SCHEDULES
from planner.specs.base import NotCoveredError, NotPossibleError
from planner.specs.estimate import EstimateRequest, PlanRequest
from planner.workload.costing import fits_of
from planner.workload.resolve import resolve
from planner.workload.train import train
from tests.planner.asking import LLAMA_8B, LLAMA_70B, MIXTRAL, TRAIN, ask, document, held
from tests.plugins.extent import sample

AXES = {
    "tensor": (1, 2, 8),
    "context": (1, 4),
    "micro_batch": (1, 2, 8),
    "zero_stage": (0, 1, 2, 3),
    "sequence_parallel": (False, True),
    "chunks": (1, 2),
}
DEVICES, PIPELINE, BATCH = 512, 4, 512
FIGURES = ("step_seconds", "tokens_per_second", "mfu", "bubble_ratio", "communication_ratio")


@cache
def setting_of(model, recomputation, attention, schedule, optimizer):
    strategy = {
        "pipeline_parallel_size": PIPELINE,
        "activation_recomputation": recomputation,
        "attention": attention,
        "pipeline_schedule": schedule,
        "offload": {"optimizer": optimizer},
    }
    request = {
        "model": model,
        "cluster": {"device": "h100-sxm-80gb", "devices_per_node": 8, "nodes": DEVICES // 8},
        "workload": {**TRAIN, "global_batch_size": BATCH, "tokens": 10**9},
        "strategy": strategy,
        "engine": "megatron",
    }
    return resolve(EstimateRequest.model_validate(request))


def laid_out(setting, expert=1, **sizes):
    data = DEVICES / (PIPELINE * sizes["tensor"] * sizes["context"])
    count = BATCH / data / sizes["micro_batch"]
    layout = replace(setting.layout, data=data, micro_batches=count, expert=expert, **sizes)
    return replace(setting, layout=layout)


def columns_of():
    """Return each axis along its own dimension, so that all of them make a grid."""
    shapes = np.eye(len(AXES), dtype=int) * -1 + (1 - np.eye(len(AXES), dtype=int))
    pairs = zip(AXES.items(), shapes, strict=True)
    return {name: np.array(values).reshape(shape) for (name, values), shape in pairs}


CHOICES = st.tuples(
    st.sampled_from((LLAMA_70B, MIXTRAL)),
    st.sampled_from(("none", "selective", "full")),
    st.sampled_from(("flash", "eager")),
    st.sampled_from(("gpipe", "1f1b", "interleaved")),
    st.sampled_from(("none", "cpu", "nvme")),
)


@settings(max_examples=40, deadline=None)
@given(choices=CHOICES, cell=st.tuples(*(st.integers(0, len(v) - 1) for v in AXES.values())))
def test_a_grid_of_layouts_costs_what_each_layout_costs_alone(choices, cell):
    setting, shape = setting_of(*choices), tuple(len(values) for values in AXES.values())
    experts = 4 if choices[0] == MIXTRAL else 1
    grid = laid_out(setting, expert=experts, **columns_of())
    together = train(grid, grid.workload, NullLedger())
    own = {name: values[at] for (name, values), at in zip(AXES.items(), cell, strict=True)}
    alone = train(laid_out(setting, expert=experts, **own), setting.workload, Ledger())

    peaks = np.broadcast_to(together.memory.peak_bytes, shape)
    assert peaks[cell] == pytest.approx(alone.memory.peak_bytes, rel=1e-12)
    for name in FIGURES:
        column = np.broadcast_to(getattr(together.performance, name), shape)
        assert column[cell] == pytest.approx(getattr(alone.performance, name), rel=1e-12)


def test_offloads_and_forgetful_ledgers_compute_the_same_in_columns():
    setting = setting_of(LLAMA_70B, "none", "flash", "1f1b", "cpu")
    grid = laid_out(setting, **columns_of())
    own = {name: values[0] for name, values in AXES.items()}

    together = train(grid, grid.workload, NullLedger()).memory.host_bytes
    alone = train(laid_out(setting, **own), setting.workload, Ledger()).memory.host_bytes

    assert np.ravel(together)[0] == pytest.approx(alone, rel=1e-12)
    assert alone > 0

    setting = setting_of(LLAMA_70B, "selective", "flash", "1f1b", "none")
    forgotten, kept = NullLedger(), Ledger()

    assert train(setting, setting.workload, forgotten).performance == (
        train(setting, setting.workload, kept).performance
    )
    assert kept.entries
    assert not forgotten.entries


CASES = {
    "one card": {"engine": None, "device": "rtx-4090"},
    "a node": {"engine": "megatron", "devices": 8},
    "a pin": {"engine": "torchtitan", "devices": 4, "pins": {"tensor_parallel_size": 2}},
    "offloading": {"engine": "deepspeed", "devices": 2},
    "a mixture": {"engine": "megatron", "devices": 8, "model": MIXTRAL},
    "too large": {"engine": "megatron", "devices": 8, "model": LLAMA_70B},
}
METHODS = ("full", "lora", "qlora")


@cache
def blocks(case, method="full"):
    fields = {"model": LLAMA_8B, **CASES[case], "workload": {**TRAIN, "method": method}}
    request = PlanRequest.model_validate(document(**fields))
    return blocks_of(next(questions(request)))


def test_recomputing_more_never_keeps_a_strategy_from_fitting():
    for method, case in sample(itertools.product(METHODS, CASES), share=0.4, kind=itemgetter(0)):
        fitting = FitCheck(blocks(case, method))
        for block in blocks(case, method):
            assert fitting.may_fit(block) == block.column(fits_of(block.setting)).any()

    order = {"none": 0, "selective": 1, "full": 2}
    for case in CASES:
        groups = {}
        for block in blocks(case):
            shared = {**block.shared, "activation_recomputation": None}
            fits = block.column(fits_of(block.setting)) > 0
            groups.setdefault(str(shared), {})[block.shared["activation_recomputation"]] = fits
        for found in groups.values():
            less, more = (
                [found[name] for name in sorted(found, key=order.get)][at] for at in (0, -1)
            )
            assert (less <= more).all(), case


def test_every_schedule_is_weighed_and_a_block_has_the_defaults_of_its_strategies():
    for (engine, schedules), stages in itertools.product(
        (("torchtitan", set(SCHEDULES)), ("megatron", {*SCHEDULES[:2]})), (2, 4)
    ):
        fields = {"model": LLAMA_8B, "engine": engine, "devices": 8, "workload": TRAIN}
        request = PlanRequest.model_validate(document(**fields))
        shared = [block.shared for block in blocks_of(next(questions(request)))]
        found = [one for one in shared if one["pipeline_parallel_size"] == stages]
        assert {one.get("pipeline_schedule") for one in found} == schedules

    sizes = {"micro_batch_size", "gradient_accumulation_steps", "zero_stage"}
    for case in CASES:
        for block in blocks(case):
            own = resolve(block.question.estimate_request(block.strategy(0))).strategy
            shared = set(block.shared) | {"optimizer_dtype", "gradient_dtype", "attention"} - sizes
            for name in shared - set(block.sizes):
                assert getattr(block.setting.strategy, name) == getattr(own, name), case


RUN = {**TRAIN, "global_batch_size": 64, "sequence_length": 8192}


def run(devices=8, nodes=1, **strategy):
    cluster = document(devices=devices)["cluster"] | {"nodes": nodes}
    return ask(
        model=LLAMA_70B, cluster=cluster, workload=RUN, strategy=strategy, engine="megatron"
    )


def terms(estimate):
    return {term.name: term for term in estimate.terms}


def values(term):
    return {value.name: value.value for value in term.inputs}


def test_rings_pay_for_keys_and_values_beyond_attention_and_chunks_hand_over():
    alone = terms(run(tensor_parallel_size=8))
    ring = terms(run(tensor_parallel_size=4, context_parallel_size=2))
    assert "Keys and values around the ring" not in alone
    # Keys and values of 2 of 8 heads of 128, half of 8192 tokens, 2 bytes each.
    sent = values(ring["Keys and values around the ring"])["payload bytes"]
    assert sent == 2 * 2 * 128 * 4096 * 2

    found = terms(run(tensor_parallel_size=4, context_parallel_size=2))
    exposed = found["Exposed ring communication"]
    links = found["Keys and values around the ring"].value
    assert 0 < exposed.value < links
    assert values(exposed)["window s"] > links

    layout = {"tensor_parallel_size": 2, "pipeline_parallel_size": 4}
    plain = terms(run(**layout))["Pipeline hand-over"]
    chunked = terms(run(**layout, virtual_pipeline_size=5))["Pipeline hand-over"]
    assert chunked.value == pytest.approx(5 * plain.value)


def test_a_zero_bubble_schedule_fills_the_bubble_holds_as_1f1b_and_waits_for_a_third():
    # arXiv:2401.10241: a third of 1F1B's; less with recomputation, all with frozen weights.
    for passes, weight_passes, divisor in ((3, 1, 3.0), (4, 1, 2.0), (2, 0, 1.0)):
        assert zero_bubble_divisor(passes, weight_passes) == divisor

    layout = {"tensor_parallel_size": 2, "pipeline_parallel_size": 4}
    plain = run(**layout, pipeline_schedule="1f1b")
    filled = run(**layout, pipeline_schedule="zero_bubble")
    waited = [
        found.performance.bubble_ratio * found.performance.step_seconds
        for found in (plain, filled)
    ]

    assert held(filled, "activations") == held(plain, "activations")
    assert waited[1] == pytest.approx(waited[0] / 3)


def test_shards_within_a_node_leave_more_states_and_their_replicas_exchange_a_shard():
    layout = {"tensor_parallel_size": 1, "zero_stage": 3}
    spread = run(nodes=4, **layout)
    hybrid = run(nodes=4, **layout, zero_shard_size=8)
    gathered = "Gathering weight shards"
    assert held(hybrid, "optimizer_states") == pytest.approx(4 * held(spread, "optimizer_states"))
    assert terms(hybrid)[gathered].value < 0.9 * terms(spread)[gathered].value

    found = terms(run(nodes=4, zero_stage=3, zero_shard_size=8))
    within = values(found["Data-parallel communication"])
    between = values(found["Exchange between replicas"])
    assert between["payload bytes"] == within["payload bytes"] / 8
    assert (within["ranks"], between["ranks"]) == (8, 4)

    plain = run(zero_stage=3)
    named = run(zero_stage=3, zero_shard_size=8)
    assert named.performance == plain.performance
    assert named.memory == plain.memory


def test_a_layout_that_contradicts_itself_is_refused_with_its_numbers():
    cases = (
        ({"zero_stage": 3, "zero_shard_size": 3}, "must divide the 8 ranks"),
        ({"zero_shard_size": 4}, "nothing is sharded"),
        ({"context_parallel_size": 3, "data_parallel_size": 1}, "must divide the 8192 tokens"),
        ({"pipeline_parallel_size": 8, "virtual_pipeline_size": 11}, "need 88 layers"),
        (
            {"pipeline_parallel_size": 8, "virtual_pipeline_size": 2, "micro_batch_size": 32},
            "needs a multiple of 8 micro-batches, here are 2",
        ),
        (
            {
                "pipeline_parallel_size": 8,
                "virtual_pipeline_size": 2,
                "pipeline_schedule": "zero_bubble",
            },
            "does not interleave",
        ),
    )
    for strategy, message in cases:
        with pytest.raises(NotPossibleError, match=message):
            run(**strategy)


def test_shards_are_no_matter_of_serving():
    with pytest.raises(NotCoveredError, match="zero_shard_size is 4"):
        ask(devices=4, strategy={"zero_shard_size": 4})
