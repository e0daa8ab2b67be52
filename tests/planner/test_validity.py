"""The rules of a layout refuse one by one exactly what they mask in columns."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.catalog.models import get_model
from planner.errors import NotPossibleError
from planner.specs.workload import TrainWorkload
from planner.workload.layouts import (
    Layout,
    Rule,
    batch_rules,
    check,
    mask,
    rank_rules,
    training_rules,
)
from tests.planner.asking import LLAMA_70B, MIXTRAL, ask

DEVICES = 64
SIZES = {
    "data_parallel_size": st.integers(1, 12),
    "tensor_parallel_size": st.integers(1, 12),
    "context_parallel_size": st.integers(1, 5),
    "expert_parallel_size": st.integers(1, 9),
    "micro_batch_size": st.integers(1, 6),
    "virtual_pipeline_size": st.integers(1, 12),
    "zero_stage": st.integers(0, 3),
    "zero_shard_size": st.sampled_from([None, 2, 3, 8]),
}
LAYOUTS = st.fixed_dictionaries(SIZES)


def rules_of(model, workload, sizes, stages, schedule):
    """Return the rules of one layout, its numbers as columns of one row."""
    columns = {name: np.array([float(value or 0)]) for name, value in sizes.items()}
    data, micro = columns["data_parallel_size"], columns["micro_batch_size"]
    layout = Layout(
        data=data,
        tensor=columns["tensor_parallel_size"],
        pipeline=stages,
        expert=columns["expert_parallel_size"],
        context=columns["context_parallel_size"],
        micro_batch=micro,
        micro_batches=workload.global_batch_size / data / micro,
        chunks=columns["virtual_pipeline_size"],
        zero_stage=columns["zero_stage"],
        shard=columns["zero_shard_size"],
    )
    yield from rank_rules(model, DEVICES, layout)
    yield from batch_rules(workload, data, micro)
    yield from training_rules(model, workload, layout, schedule)


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from([LLAMA_70B, MIXTRAL]),
    sizes=LAYOUTS,
    stages=st.sampled_from([1, 2, 8, 96]),
    schedule=st.sampled_from(["1f1b", "interleaved", "zero_bubble"]),
    batch=st.sampled_from([8, 24, 64]),
)
def test_a_layout_is_masked_exactly_where_the_exact_door_refuses_it(
    name, sizes, stages, schedule, batch
):
    workload = TrainWorkload(sequence_length=4096, global_batch_size=batch)
    rules = rules_of(get_model(name), workload, sizes, stages, schedule)
    allowed = bool(np.all(mask(rules)))
    strategy = {**sizes, "pipeline_parallel_size": stages, "pipeline_schedule": schedule}

    try:
        ask(model=name, devices=DEVICES, workload=workload, strategy=strategy, engine="megatron")
    except NotPossibleError:
        assert not allowed
    else:
        assert allowed


def test_the_first_rule_that_does_not_hold_is_the_one_that_is_named():
    rules = [Rule(True, "a", str), Rule(False, "b", lambda: "no"), Rule(False, "c", str)]

    with pytest.raises(NotPossibleError, match="no") as caught:
        check(rules)

    assert caught.value.field == "b"


@given(flags=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=4))
def test_a_mask_holds_where_every_rule_holds(flags):
    rules = [Rule(np.array(column), "", str) for column in flags]

    assert np.all(mask(rules) == np.array(flags).all(axis=0))


@pytest.mark.parametrize("size", [3, 5, 6, 7])
def test_heads_are_never_cut(size):
    with pytest.raises(NotPossibleError, match="must divide the 64 attention heads"):
        ask(model=LLAMA_70B, devices=8, strategy={"tensor_parallel_size": size})
