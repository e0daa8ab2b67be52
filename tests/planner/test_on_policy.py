"""Reinforcement learning: what completions of a policy cost, and which devices generate them."""

import numpy as np
import pytest

from planner.api import inverse, plan
from planner.cost.quantity import NullLedger
from planner.cost.rollout import in_flight_generation_seconds, lengths_of
from planner.fitting import on_policy
from planner.search.engine import blocks_of
from planner.search.question import figure, questions
from planner.search.rollouts import IN_TURN
from planner.search.scoring import score
from planner.specs.base import PlannerError
from planner.specs.estimate import EstimateRequest, InverseRequest, PlanRequest
from planner.specs.workload import TrainWorkload
from planner.workload.on_policy import SYNC_BETWEEN, SYNC_IN_PLACE, generation, lengths
from planner.workload.resolve import resolve
from tests.planner.asking import CARD, CPU, LLAMA_8B, TINY, ask, document, held, search
from tests.planner.test_preference import WEIGHTS

PROMPT, MOST, MEAN, BATCH = 64, 448, 112, 64
WORK = {
    "kind": "train",
    "objective": "grpo",
    "sequence_length": PROMPT + MOST,
    "max_completion_length": MOST,
    "mean_completion_length": MEAN,
    "global_batch_size": BATCH,
}
SHARE = 0.2
ROLLOUT = {"gpu_memory_utilization": SHARE}
SUPERVISED = {name: WORK[name] for name in ("kind", "sequence_length", "global_batch_size")}
PHASES = ("rollout", "reward", "reward_model", "swap", "log_probs", "update", "weight_sync")


def stepping(workload=None, rollout=None, **fields):
    if (rollout or {}).get("sleep") == "both":
        fields = {"engine": "nemo_rl", **fields}  # the trainer of TRL does not sleep
    strategy = {"micro_batch_size": 2, "weight_dtype": "bf16", **fields.pop("strategy", {})}
    if rollout is not None:
        strategy["rollout"] = {**ROLLOUT, **rollout}
    base = {"model": TINY, "device": CARD, "devices": 4, "engine": "trl", "strategy": strategy}
    return {**base, "workload": {**WORK, **(workload or {})}, **fields}


def supervised(rollout=None):
    return ask(**{**stepping(None, rollout), "workload": SUPERVISED})


def step(workload=None, rollout=None, **fields):
    return ask(**stepping(workload, rollout or {}, **fields))


def phases(estimate_):
    spent = estimate_.time_breakdown_seconds
    return {name: sum(spent.get(name, {}).values()) for name in PHASES}


def seconds(*args, **fields):
    return step(*args, **fields).performance.step_seconds


def test_lengths_keep_their_mean_when_they_are_cut_and_the_longest_grows():
    for variation in (None, 0.1, 0.5, 1.0, 2.0):
        law = lengths_of(100.0, 400.0, variation)
        assert law.mean == pytest.approx(100, rel=1e-6), variation
        assert law.tokens.max() <= 400
        longest = [law.longest_of(count) for count in (1, 8, 64, 4096)]
        assert longest == sorted(longest)
        assert longest[0] == pytest.approx(law.mean, rel=1e-6)
    # No variation is one at which the law changes.
    close = np.linspace(0.02, 2.0, 397)
    longest = [lengths_of(100.0, 1e6, float(each)).longest_of(64.0) for each in close]
    assert np.all(np.diff(longest) > 0)
    assert np.max(np.diff(longest)) < 3 * np.median(np.diff(longest))
    # Each token is as likely to be the last: e^-1 are longer than the mean of uncut lengths.
    free = lengths_of(100.0, 1e6, None)
    assert free.longer_than(np.array([100.0]))[0] == pytest.approx(np.exp(-1), abs=0.002)
    assert free.while_decoding == pytest.approx(100, rel=0.02)
    assert lengths_of(448.0, 448.0, None).longest_of(2.0) == 448


def test_a_step_is_the_sum_of_its_phases_or_the_longer_side_of_two():
    rewards = {"reward_seconds": 0.5, "reward_model": "Qwen/Qwen3-0.6B"}
    together = step(rewards, {"sleep": "both"})
    spent = phases(together)
    assert all(value > 0 for value in spent.values()), spent
    assert sum(spent.values()) == pytest.approx(together.performance.step_seconds)
    assert together.performance.rollout_idle_ratio is None
    for staleness in (0, 1):
        apart = step({"staleness": staleness, **rewards}, {"devices": 2})
        spent, whole = phases(apart), apart.performance.step_seconds
        # A reward model works on the training devices, functions follow the generation.
        trains = spent["reward_model"] + spent["log_probs"] + spent["update"]
        sides = spent["rollout"] + spent["reward"], trains
        joined = max(sides) if staleness else sum(sides)
        assert whole == pytest.approx(joined + spent["weight_sync"])
        idle = apart.performance
        assert idle.rollout_idle_ratio == pytest.approx(1 - spent["rollout"] / whole)
        assert idle.trainer_idle_ratio == pytest.approx(1 - sides[1] / whole)


def test_the_explanation_says_every_phase_that_depends_on_the_rollout():
    told = {term.key: term.value for term in step({}, {"sleep": "both"}).terms}
    assert {"generate", "tail", "swap", "weight_sync", "on_policy_step"} <= told.keys()
    assert 0 < told["tail"] < 1


def test_updates_and_scores_count_each_completion_as_often_as_they_read_it():
    base = phases(step())
    for workload, updates, scores in (
        ({"num_iterations": 3}, 3, 1),
        ({"generation_batch_size": 4 * BATCH}, 4, 4),
        ({"beta": 0.04}, 1, 2),
    ):
        found = phases(step(workload))
        assert found["update"] == pytest.approx(updates * base["update"], rel=1e-4), workload
        assert found["log_probs"] == pytest.approx(scores * base["log_probs"], rel=1e-4), workload


def test_memory_of_a_device_is_that_of_its_fullest_phase():
    share = SHARE * CARD["memory_bytes"]
    alone = supervised()
    peak = alone.memory.per_device_peak_bytes

    def peak_of(rollout):
        return step({}, rollout).memory.per_device_peak_bytes

    beside = peak_of({"sleep": "none"})
    assert beside == pytest.approx(peak + share, rel=1e-6)
    kept = beside - share
    assert max(share, peak) < peak_of({"sleep": "generator"}) < beside
    assert peak_of({"sleep": "both"}) == pytest.approx(max(share, kept), rel=1e-6)
    assert peak_of({"devices": 2}) == pytest.approx(max(share, peak), rel=1e-6)
    away = step({}, {"sleep": "both"}).memory.host_bytes
    states = sum(held(alone, name) for name in ("weights", "optimizer_states"))
    assert away >= 4 * states


def test_a_reference_is_held_where_the_divergence_has_a_weight():
    for method, beta, copies in (("full", 0.0, 0), ("full", 0.1, 1), ("lora", 0.1, 0)):
        found = step({"beta": beta, "method": method})
        assert held(found, "reference_weights") == copies * WEIGHTS * 2, (method, beta)
    scored = step({"reward_model": "Qwen/Qwen3-0.6B"})
    assert held(scored, "reference_weights") > 1e9
    assert phases(scored)["reward_model"] > 0


def test_the_weights_cross_a_link_once_a_step():
    link = CARD["intra_node_bandwidth_bytes_per_second"]
    for rollout, efficiency in (({}, SYNC_IN_PLACE), ({"devices": 2}, SYNC_BETWEEN)):
        found = phases(step({}, rollout))["weight_sync"]
        assert found * link * efficiency >= WEIGHTS * 2
        half = phases(step({}, {**rollout, "weight_dtype": "fp8"}))["weight_sync"]
        assert half < 0.6 * found


def test_a_step_takes_no_less_for_more_and_no_more_for_more_devices():
    for name, values in (
        ("mean_completion_length", (56, 112, 224, 448)),
        ("length_variation", (0.1, 0.5, 1.0)),
        ("generation_batch_size", (64, 128, 256)),
        ("num_iterations", (1, 2, 4)),
        ("reward_seconds", (0.0, 0.1, 1.0)),
    ):
        for rollout in ({}, {"devices": 2}):
            found = [seconds({name: value}, rollout) for value in values]
            assert found == sorted(found), (name, rollout)
    spent = [
        phases(step({}, {"devices": devices}, devices=devices + 1))["rollout"]
        for devices in (1, 2, 4, 8)
    ]
    assert spent == sorted(spent, reverse=True)
    late = [seconds({"staleness": value}, {"devices": 2}) for value in (0, 1, 2, 4, 8)]
    assert late == sorted(late, reverse=True)


def test_batches_join_where_new_weights_reach_an_engine_that_generates():
    for drained, joined in ((10.0, 6.0), (10.0, 10.0)):
        spent = [
            in_flight_generation_seconds(drained_s=drained, joined_s=joined, trainer_s=trainer)
            for trainer in (0.0, 1.0, 5.0, 9.0, 10.0, 20.0)
        ]
        assert spent == sorted(spent), (drained, joined)
        assert (spent[0], spent[-2], spent[-1]) == (joined, drained, drained)
        assert spent[2] == pytest.approx(joined + (drained - joined) * 5 / spent[2])
    # One update off policy, of a trainer that takes no time beside the completions.
    heavy = {"mean_completion_length": 400, "generation_batch_size": 16 * BATCH}
    late = [
        phases(step({"staleness": staleness, **heavy}, {"devices": 2}, engine=engine))["rollout"]
        for engine, staleness in (("verl", 1), ("nemo_rl", 1), ("verl", 2))
    ]
    assert late[0] > late[1] >= late[2] * 0.999


def test_a_server_runs_as_many_completions_as_their_length_so_far_allows():
    few = {"gpu_memory_utilization": 0.018}
    held = {}
    for variation in (0.01, 1.0):
        even = {"length_variation": variation, "mean_completion_length": MOST // 2}
        request = EstimateRequest.model_validate(document(**stepping(even, few)))
        setting = resolve(request)
        made = generation(setting, setting.workload, NullLedger())
        held[variation] = made.slots * (PROMPT + lengths(setting.workload).while_decoding)
    # Equal lengths are half as long on their way as those of which each token may be the last.
    assert held[0.01] == pytest.approx(held[1.0])


def test_the_trainers_own_model_generates_without_a_copy():
    small = {"weight_dtype": "fp32", "micro_batch_size": 2}
    found = ask(**document(model=TINY, device=CPU, engine="trl", workload=WORK, strategy=small))
    assert found.strategy.rollout.engine == "transformers"
    assert phases(found)["weight_sync"] == 0
    assert phases(found)["rollout"] > 0
    # One update has the log-probabilities of its completions in its own forward pass.
    assert phases(found)["log_probs"] == 0
    twice = document(
        model=TINY,
        device=CPU,
        engine="trl",
        strategy=small,
        workload={**WORK, "num_iterations": 2},
    )
    assert phases(ask(**twice))["log_probs"] > 0
    plans = search(model=TINY, device=CPU, engine="trl", workload=WORK, top=20).plans
    assert plans
    assert all(plan.strategy.rollout.devices == 0 for plan in plans)


REFUSED = (
    ({"staleness": 1, "generator": "colocated"}, {}, "staleness"),
    ({"staleness": 1}, {}, "workload.staleness"),
    ({"staleness": 1}, None, "workload.rollout_devices"),
    ({"max_completion_length": 600}, {}, "max_completion_length"),
    ({"max_prompt_length": 65}, {}, "max_prompt_length"),
    ({"mean_completion_length": 449}, {}, "mean_completion_length"),
    ({"global_batch_size": 60}, {}, "global_batch_size"),
    ({"generation_batch_size": 96}, {}, "generation_batch_size"),
    ({"document_tokens": 9}, {}, "document_tokens"),
    ({"generator": "separate"}, None, "workload.rollout_devices"),
    ({"generator": "colocated"}, {"devices": 2}, "strategy.rollout.devices"),
    ({"rollout_devices": 1}, {"devices": 2}, "strategy.rollout.devices"),
    ({}, {"devices": 4}, "strategy.rollout.devices"),
    ({}, {"devices": 2, "sleep": "both"}, "strategy.rollout.sleep"),
    ({}, {"engine": "transformers"}, "strategy.rollout.gpu_memory_utilization"),
    ({}, {"tensor_parallel_size": 3}, "strategy.rollout.tensor_parallel_size"),
    ({"reward_model": "no/such"}, {}, "workload.reward_model"),
    ({"sequence_length": 10**6}, {}, "workload.sequence_length"),
    ({"sequence_length": 10**6, "max_completion_length": 999_936}, {}, "workload.sequence_length"),
)


def test_what_contradicts_itself_is_refused_by_name():
    for workload, rollout, field in REFUSED:
        with pytest.raises((PlannerError, ValueError)) as caught:
            ask(**stepping(workload, rollout))
        named = getattr(caught.value, "field", None) or str(caught.value)
        assert field in named, (workload, rollout, named)
    with pytest.raises(ValueError, match="staleness is of the completions"):
        TrainWorkload(sequence_length=8, global_batch_size=8, staleness=1)
    with pytest.raises(PlannerError, match="objective grpo"):
        supervised({})
    with pytest.raises(PlannerError, match="trains supervised alone"):
        step(engine="torchtitan")
    # What asks for devices that there cannot be is named as such, without advice in a circle.
    for device, asked, words in (
        (CARD, {"staleness": 1}, "the cluster has one device"),
        (CARD, {"generator": "separate"}, "the cluster has one device"),
        (CARD, {"rollout_devices": 1}, "the cluster has one device"),
        (CPU, {"staleness": 1}, "no server of completions is planned"),
        (CPU, {"generator": "separate"}, "no server of completions is planned"),
        (CPU, {"rollout_devices": 1}, "no server of completions is planned"),
    ):
        (name,) = asked
        with pytest.raises(PlannerError, match=words) as caught:
            search(model=TINY, device=device, engine="trl", workload={**WORK, **asked})
        assert caught.value.field == f"workload.{name}", (device["id"], asked)


@pytest.mark.slow
def test_a_search_divides_the_devices_and_keeps_to_what_is_asked():
    base = {"model": TINY, "device": CARD, "devices": 8, "engine": "nemo_rl", "top": 100}
    found = search(**base, workload=WORK, objective="throughput").plans
    asked = PlanRequest.model_validate(document(**base, workload=WORK))
    blocks = blocks_of(next(questions(asked)))
    # Seven ranks divide no batch of 64.
    assert {block.shared["rollout"].devices for block in blocks} == set(range(8)) - {1}
    for each in found:
        layout = each.strategy
        ranks = layout.data_parallel_size * layout.tensor_parallel_size
        ranks *= layout.pipeline_parallel_size * (layout.context_parallel_size or 1)
        assert ranks + layout.rollout.devices == 8
    for asked, holds in (
        ({"generator": "colocated"}, lambda devices: devices == 0),
        ({"generator": "separate"}, lambda devices: devices > 0),
        ({"rollout_devices": 2}, lambda devices: devices == 2),
        ({"staleness": 1}, lambda devices: devices > 0),
    ):
        plans = search(**base, workload={**WORK, **asked}).plans
        assert plans, asked
        assert all(holds(plan.strategy.rollout.devices) for plan in plans), asked


def test_a_search_scores_each_division_as_an_estimate_costs_it():
    """Columns share the costs of training whose rollouts differ; an estimate has its own."""
    asked = [
        document(
            model=TINY, device=CARD, devices=4, engine="nemo_rl",
            workload={**WORK, "staleness": staleness},
        )
        for staleness in (0, 2)
    ]  # fmt: skip
    seen = set()
    for block in [
        block
        for each in asked
        for block in blocks_of(next(questions(PlanRequest.model_validate(each))))[::7]
    ]:
        part = score(block)
        for row in range(0, len(part), 11):
            exact = part.exact(row)
            seen.add((exact.strategy.rollout.devices, exact.strategy.rollout.sleep))
            for name in ("step_seconds", "rollout_idle_ratio", "per_device_peak_bytes"):
                column, value = part.figures(name), figure(exact, name)
                if value is not None:
                    assert column[row] == pytest.approx(value, rel=1e-9), (name, exact.strategy)
            assert bool(part.fits[row]) == exact.fits
    assert len(seen) >= 4


def test_a_change_that_helps_is_one_that_a_policy_can_make():
    """Completions get shorter, prompts do not; a policy has no answers to keep ahead."""
    large = {"model": LLAMA_8B, "device": "rtx-3090", "engine": "trl"}
    work = {**WORK, "beta": 0.1, "max_prompt_length": PROMPT}
    answer = search(**large, workload=work)
    assert not answer.plans
    asked = document(**large, workload=work)
    assert answer.suggestions
    for suggestion in answer.suggestions:
        PlanRequest.model_validate({**asked, **suggestion.changes})  # is a request again


def test_the_best_of_more_devices_is_no_slower():
    for engine in ("trl", "nemo_rl"):
        best = [
            search(
                model=TINY, device=CARD, devices=devices, engine=engine,
                workload={**WORK, "staleness": 1}, objective="throughput", top=1,
            ).plans[0].performance.step_seconds
            for devices in (2, 4, 8)
        ]  # fmt: skip
        assert best == sorted(best, reverse=True), engine


LONG = {
    "kind": "train", "objective": "grpo", "method": "full", "sequence_length": 4096,
    "max_completion_length": 3072, "max_prompt_length": 1024, "global_batch_size": 512,
}  # fmt: skip


def on_nodes(nodes, workload=None, **fields):
    cluster = {"device": "h100-sxm-80gb", "devices_per_node": 8, "nodes": nodes}
    asked = {
        "model": "Qwen/Qwen3-8B",
        "cluster": cluster,
        "workload": {**LONG, **(workload or {})},
    }
    return plan(PlanRequest.model_validate({**asked, "top": 1, **fields})).plans[0].strategy


def test_any_number_of_nodes_is_divided_so_that_the_trainers_ranks_divide_the_batch():
    for nodes in (3, 5, 6, 7, 11):
        layout = on_nodes(nodes)
        assert 512 % layout.data_parallel_size == 0
        assert layout.rollout.devices % 8 == 0, nodes
    whole = {**WORK, "generator": "colocated"}
    with pytest.raises(PlannerError, match="on 7 of the 7 devices") as caught:
        search(model=TINY, device=CARD, devices=7, engine="trl", workload=whole)
    assert caught.value.field == "workload.global_batch_size"


def test_plans_of_trl_are_ones_that_it_can_run():
    for nodes in (1, 2):
        rollout = on_nodes(nodes).rollout
        assert rollout.sleep != "both"
    for rollout, field in (({"sleep": "both"}, "sleep"), ({"engine": "sglang"}, "engine")):
        with pytest.raises(PlannerError, match="Hugging Face TRL has") as caught:
            step({}, rollout, engine="trl")
        assert caught.value.field == f"strategy.rollout.{field}"
    for workload, rollout, words in (
        ({"staleness": 2}, {"devices": 2, "tensor_parallel_size": 2}, "max_staleness to 2"),
        ({}, {"devices": 2}, "2 copies generate"),
        ({}, {"weight_dtype": "fp8"}, "TRL has no option"),
    ):
        (warning,) = step(workload, rollout, engine="trl").warnings
        assert words in warning
        assert not step(workload, rollout, engine="nemo_rl").warnings


def test_a_pinned_field_of_the_rollout_leaves_the_others_open():
    free, shares = on_nodes(2).rollout, {share for _, share in IN_TURN}
    for pinned in ({}, {"weight_dtype": "fp8"}, {"sleep": "both"}, {"devices": 8}):
        request = PlanRequest.model_validate(
            {"model": TINY, "cluster": {"device": "h100-sxm-80gb"}, "workload": LONG,
             "pins": {"rollout": pinned}}
        )  # fmt: skip
        stored = request.model_dump(mode="json")["pins"]["rollout"]
        assert stored == pinned  # a stored request leaves open what it left open
        engine = "nemo_rl" if "sleep" in pinned else "trl"
        layout = on_nodes(2, engine=engine, pins={"rollout": stored}).rollout
        assert {name: getattr(layout, name) for name in pinned} == pinned
        assert layout.stated.keys() >= free.stated.keys() - {"weight_dtype"}
        assert layout.devices or layout.gpu_memory_utilization in shares, pinned


def test_a_limit_on_the_sequence_is_one_on_the_completions():
    question = document(model=TINY, device=CARD, engine="trl", workload=WORK)
    answer = inverse(InverseRequest.model_validate({**question, "question": "longest_sequence"}))
    longest = int(answer.limits[0].value)
    assert longest > PROMPT + MOST
    longer = TrainWorkload.model_validate(WORK).with_sequences_of(longest)
    assert longer.max_completion_length == longest - PROMPT
    assert longer.mean_completion_length == MEAN


def test_a_limit_on_batches_keeps_what_is_stated_and_whole_groups():
    def limit(question, constraints=None, **work):
        asked = {"model": TINY, "device": CARD, "devices": 2, "engine": "trl"}
        asked = document(**asked, workload={**WORK, "max_prompt_length": PROMPT, **work})
        asked |= {"question": question, "constraints": constraints or {}}
        return inverse(InverseRequest.model_validate(asked))

    slow = {"step_seconds": {"max": seconds({}, devices=2) * 2.7}}
    found = limit("largest_batch", slow, num_generations=7, global_batch_size=14).limits[0]
    assert found.value % 14 == 0
    assert found.interval[0] < found.value < found.interval[1]
    with pytest.raises(PlannerError, match="generation_batch_size is 256") as caught:
        limit("largest_batch", generation_batch_size=256)
    assert caught.value.field == "workload.generation_batch_size"
    # No sequence is shorter than its prompt.
    never = {"step_seconds": {"max": 1e-9}}
    assert limit("longest_sequence", never).smallest.value > PROMPT


def test_the_page_states_the_shares_that_were_set_on_published_rows_and_their_change():
    said = " ".join(on_policy.WORDS.split())
    assert f"{SYNC_IN_PLACE} on the same devices and {SYNC_BETWEEN} between devices" in said
    assert f"from 1.0 to {SYNC_BETWEEN}" in said
    assert f"| all three | {SYNC_BETWEEN} |" in said


def test_published_steps_and_splits_are_met():
    """Some rows were shut before anything was predicted (planner/fitting/on_policy.py)."""
    answered, _ = on_policy.answered_rows()
    groups = on_policy.compared(answered)
    for side in ("open", "shut"):
        errors = [abs(each.error) for each in groups["step_seconds", "nemo_rl", side]]
        assert len(errors) >= 12
        assert np.median(errors) <= 0.2, side
    clear = [
        sweep
        for sweep in on_policy.sweeps(answered)
        if abs(np.log(sweep.published)) >= np.log(1.1)
    ]
    assert len(clear) >= 16
    assert sum(sweep.is_right for sweep in clear) >= 0.8 * len(clear)
