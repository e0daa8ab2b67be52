"""The offload of a plan as the job's: whole layers, experts, or a policy."""

import pytest

from planner.specs.model import ModelSpec
from planner.specs.workload import Strategy
from runners.jobspec.generate import ExpertCache, LayerStreaming, PolicyOffload
from runners.plans.generation_spec import is_weights_only, offload_of
from runners.plans.refusals import DraftProblem

DENSE = ModelSpec(
    model_type="llama",
    head_dim=16,
    max_position_embeddings=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=512,
)
SPARSE = DENSE.model_copy(
    update={"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
)


def strategy_with(**offload: float) -> Strategy:
    return Strategy.model_validate({"weight_dtype": "bf16", "offload": offload})


def test_the_shares_of_weights_away_are_rounded_to_whole_layers():
    for offload, resident, in_host, place in [
        ({"weights_cpu": 0.25}, 6, 0, "host_memory"),
        ({"weights_cpu": 0.3}, 5, 0, "host_memory"),
        ({"weights_disk": 1.0}, 0, 0, "disk"),
        ({"weights_cpu": 0.25, "weights_disk": 0.5}, 2, 2, "disk"),
        ({"weights_cpu": 0.3, "weights_disk": 0.3}, 3, 2, "disk"),
    ]:
        asked = offload_of(strategy_with(**offload), DENSE)
        wanted = LayerStreaming(
            layers_resident=resident, layers_in_host=in_host, layers_from=place
        )
        assert asked == wanted, offload
    assert offload_of(Strategy(weight_dtype="bf16"), DENSE) is None


def test_of_a_sparse_model_experts_leave_and_guesses_have_their_room_from_the_plans():
    for offload, place, fewest, most in [
        ({"weights_cpu": 0.5}, "host_memory", 3, 4),
        ({"weights_disk": 0.25}, "disk", 5, 6),
    ]:
        asked = offload_of(strategy_with(**offload), SPARSE)
        assert isinstance(asked, ExpertCache), offload
        assert fewest <= asked.experts_resident <= most, offload
        assert (asked.experts_from, asked.guessed_experts) == (place, 2), offload


def test_of_a_sparse_model_an_expert_of_each_layer_and_the_cache_stay():
    with pytest.raises(DraftProblem, match="Jobs keep at least one"):
        offload_of(strategy_with(weights_disk=1.0), SPARSE)

    with pytest.raises(
        DraftProblem, match="cache on disk: for a mixture of experts, jobs offload"
    ):
        offload_of(strategy_with(weights_cpu=0.5, kv_disk=0.5), SPARSE)

    share = {"weights_cpu": 0.8}
    asked = offload_of(strategy_with(**share), SPARSE)
    assert (asked.experts_resident, asked.guessed_experts) == (1, 0)


def test_a_plan_with_more_than_whole_layers_away_is_followed_as_a_policy():
    for more, shares in [
        ({}, {"kv_cpu": 0.5, "kv_disk": 0.25}),
        ({}, {"activations_cpu": 1.0}),
        ({"micro_batch_size": 4}, {"weights_disk": 0.5}),
        ({"weight_dtype": "int4", "group_size": 32}, {"weights_cpu": 0.5}),
        ({"weight_dtype": "int4"}, {"weights_cpu": 0.5}),
    ]:
        strategy = strategy_with(**shares).model_copy(update=more)

        asked = offload_of(strategy, DENSE)

        assert asked == PolicyOffload(
            **shares,
            micro_batch_size=more.get("micro_batch_size"),
            group_size=more.get("group_size", 64),
        ), (more, shares)


def test_more_than_weights_off_the_device_is_told_apart():
    for more in [{"kv_cpu": 0.5}, {"activations_cpu": 1.0}]:
        assert is_weights_only(strategy_with(weights_cpu=0.5)), more
        assert not is_weights_only(strategy_with(weights_cpu=0.5, **more)), more
