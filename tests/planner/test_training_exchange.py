"""What training sends: rings, replicas of shards, chunks of a pipeline, and what waits."""

import pytest

from planner.cost.training import zero_bubble_divisor
from planner.errors import NotCoveredError, NotPossibleError
from tests.planner.asking import LLAMA_70B, TRAIN, ask, document, held

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


def test_context_parallelism_pays_for_passing_keys_and_values_around():
    alone = terms(run(tensor_parallel_size=8))
    ring = terms(run(tensor_parallel_size=4, context_parallel_size=2))

    assert "Keys and values around the ring" not in alone
    # Keys and values of 2 of 8 heads of 128, half of 8192 tokens, 2 bytes each.
    sent = values(ring["Keys and values around the ring"])["payload bytes"]
    assert sent == 2 * 2 * 128 * 4096 * 2


def test_a_ring_costs_what_attention_does_not_hide():
    found = terms(run(tensor_parallel_size=4, context_parallel_size=2))
    exposed = found["Exposed ring communication"]
    links = found["Keys and values around the ring"].value

    assert 0 < exposed.value < links
    assert values(exposed)["window s"] > links


def test_every_chunk_of_a_stage_hands_over():
    layout = {"tensor_parallel_size": 2, "pipeline_parallel_size": 4}
    plain = terms(run(**layout))["Pipeline hand-over"]
    chunked = terms(run(**layout, virtual_pipeline_size=5))["Pipeline hand-over"]

    assert chunked.value == pytest.approx(5 * plain.value)


@pytest.mark.parametrize(
    ("passes", "weight_passes", "divisor"), [(3, 1, 3.0), (4, 1, 2.0), (2, 0, 1.0)]
)
def test_a_zero_bubble_schedule_fills_the_bubble_with_weight_gradients(
    passes, weight_passes, divisor
):
    """arXiv:2401.10241: a third of 1F1B's; less with recomputation, all with frozen weights."""
    assert zero_bubble_divisor(passes, weight_passes) == divisor


def test_a_zero_bubble_schedule_holds_what_1f1b_holds_and_waits_for_a_third():
    layout = {"tensor_parallel_size": 2, "pipeline_parallel_size": 4}
    plain = run(**layout, pipeline_schedule="1f1b")
    filled = run(**layout, pipeline_schedule="zero_bubble")
    waited = [
        found.performance.bubble_ratio * found.performance.step_seconds
        for found in (plain, filled)
    ]

    assert held(filled, "activations") == held(plain, "activations")
    assert waited[1] == pytest.approx(waited[0] / 3)


def test_shards_within_a_node_leave_more_states_and_gather_over_faster_links():
    layout = {"tensor_parallel_size": 1, "zero_stage": 3}
    spread = run(nodes=4, **layout)
    hybrid = run(nodes=4, **layout, zero_shard_size=8)
    gathered = "Gathering weight shards"

    assert held(hybrid, "optimizer_states") == pytest.approx(4 * held(spread, "optimizer_states"))
    assert terms(hybrid)[gathered].value < 0.9 * terms(spread)[gathered].value


def test_replicas_of_shards_exchange_a_shard_each():
    found = terms(run(nodes=4, zero_stage=3, zero_shard_size=8))
    within = values(found["Data-parallel communication"])
    between = values(found["Exchange between replicas"])

    assert between["payload bytes"] == within["payload bytes"] / 8
    assert (within["ranks"], between["ranks"]) == (8, 4)


def test_one_group_of_shards_is_plain_sharding():
    plain = run(zero_stage=3)
    named = run(zero_stage=3, zero_shard_size=8)

    assert named.performance == plain.performance
    assert named.memory == plain.memory


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
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
    ],
)
def test_a_layout_that_contradicts_itself_is_refused_with_its_numbers(strategy, message):
    with pytest.raises(NotPossibleError, match=message):
        run(**strategy)


def test_shards_are_no_matter_of_serving():
    with pytest.raises(NotCoveredError, match="zero_shard_size is 4"):
        ask(devices=4, strategy={"zero_shard_size": 4})
