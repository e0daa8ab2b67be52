"""Trainings that compare answers: pairs of sequences, a reference, a reward model's head."""

from itertools import product

import pytest

from planner.catalog.engines import get_engine
from planner.specs.base import PlannerError
from planner.specs.workload import TrainWorkload
from planner.workload.layouts import batch_rules, rules_mask
from tests.planner.asking import CARD, LLAMA_8B, TINY, ask, held, search

# Query and output 256 x 256 each, keys and values 256 x 128 each, three of 256 x 768; six layers.
LINEAR = 6 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 768)
TABLE = 4096 * 256
NORMS = (2 * 6 + 1) * 256
WEIGHTS = LINEAR + 2 * TABLE + NORMS
LENGTH, RECORDS = 512, 8
OBJECTIVES = ("supervised", "dpo", "kto", "orpo", "reward")
METHODS = ("full", "lora", "qlora")
TRL = get_engine("trl", "gpu", training=True)
BF16 = {"weight_dtype": "bf16", "micro_batch_size": 2}


def training(objective="supervised", method="full", **fields):
    strategy = {"micro_batch_size": 2, **fields.pop("strategy", {})}
    if method != "qlora":
        strategy = {**BF16, **strategy}
    work = {"kind": "train", "sequence_length": LENGTH, "global_batch_size": RECORDS}
    work |= {"objective": objective, "method": method, **fields.pop("workload", {})}
    return {"model": TINY, "device": CARD, "engine": "trl", "workload": work, "strategy": strategy,
            **fields}  # fmt: skip


def asked(*args, **fields):
    return ask(**training(*args, **fields))


def terms(*args, **fields):
    return {term.name: term for term in asked(*args, **fields).terms}


def test_a_reference_is_one_more_copy_of_the_weights_where_all_are_trained():
    """Two bytes a weight; adapters are switched off in its place, and answers may be kept."""
    copies = {"dpo": WEIGHTS * 2, "kto": WEIGHTS * 2}
    for objective in OBJECTIVES:
        found = asked(objective)
        assert held(found, "reference_weights") == copies.get(objective, 0), objective
    for objective, method in product(("dpo", "kto"), ("lora", "qlora")):
        assert held(asked(objective, method), "reference_weights") == 0
    ahead = asked("dpo", workload={"precompute_reference": True})
    assert held(ahead, "reference_weights") == 0


def test_a_reference_is_sharded_with_the_weights():
    layout = {"data_parallel_size": 4, "zero_stage": 3}
    for stage, share in ((3, 4), (2, 1)):
        found = asked("dpo", devices=4, strategy={**layout, "zero_stage": stage})
        assert held(found, "reference_weights") == pytest.approx(WEIGHTS * 2 / share, abs=1)


def test_a_reward_model_has_one_score_in_place_of_the_vocabulary():
    found = asked("reward")
    assert held(found, "weights") == (WEIGHTS - TABLE + 256) * 2
    assert held(found, "gradients") == held(found, "weights")
    tied = asked("reward", model={**TINY, "tie_word_embeddings": True})
    assert held(tied, "weights") == held(found, "weights")


# Tokens of a micro-batch of two records: a pair has two sequences.
PAIRS, SINGLE = 2 * 2 * LENGTH, 2 * LENGTH
# By hand, in bytes: a tile of all tokens and the whole vocabulary in 16 bits, sums of gradients in
# fp32: of the last hidden states, and of the head, which accumulates over micro-batches.
TILED = {tokens: tokens * 4096 * 2 + 4 * 256 * (tokens + 4096) for tokens in (PAIRS, SINGLE)}


@pytest.mark.parametrize(
    ("objective", "logits"),
    [
        ("supervised", TILED[SINGLE]),
        ("dpo", TILED[PAIRS]),
        ("kto", TILED[SINGLE]),
        ("orpo", PAIRS * 4096 * 14),
        ("reward", PAIRS * 10),
    ],
)
def test_the_logits_of_a_loss_are_those_of_its_trainer(objective, logits):
    fitted = 1.0 if objective in {"supervised", "dpo", "kto"} else TRL.loss_ratio
    assert terms(objective)["Logits in the loss"].value == pytest.approx(logits * fitted)


def test_tiles_are_no_wider_than_trls_and_older_releases_hold_all_logits():
    wide = {**TINY, "vocab_size": 100_000}
    of_tile = terms("dpo", "lora", model=wide)["Logits in the loss"].value
    assert of_tile == PAIRS * 32_768 * 2 + 4 * 256 * PAIRS
    for objective, tokens in (("dpo", PAIRS), ("supervised", 256)):
        older = terms(objective, engine="trl 1.14")["Logits in the loss"].value
        assert older == pytest.approx(tokens * 4096 * 10 * TRL.loss_ratio)


# Forward passes without gradients over a record's sequences: in a step, with answers kept ahead.
FORWARDS = {"dpo": (1, 0), "kto": (3, 1)}


def test_each_pass_of_a_reference_multiplies_as_a_policys_forward_pass():
    for objective, passes in FORWARDS.items():
        for ahead, count in zip((False, True), passes, strict=True):
            told = terms(objective, workload={"precompute_reference": ahead})
            own = told["Matrix products: forward, backward, recomputation"].value
            extra = [
                each.value
                for name, each in told.items()
                if name.endswith(("forward: Matrix products", "forwards: Matrix products"))
            ]
            # Three passes with gradients and one of recomputation.
            assert sum(extra) == pytest.approx(own * count / 4), (objective, ahead)


def test_model_flops_count_what_the_objective_needs():
    base = asked().performance
    flops = {
        name: asked(name).performance.model_flops_per_second_per_device
        * asked(name).performance.step_seconds
        for name in ("supervised", "dpo", "kto", "orpo")
    }
    one = base.model_flops_per_second_per_device * base.step_seconds
    for name, factor in (("orpo", 2), ("dpo", 2 * 4 / 3), ("kto", 6 / 3)):
        assert flops[name] == pytest.approx(one * factor), name


def test_a_pass_before_the_steps_takes_the_time_that_it_saves_in_them():
    """As many tokens as two steps: the reference answers each record once, in either way."""
    tokens = 2 * RECORDS * 2 * LENGTH
    beside, ahead = (
        asked("dpo", workload={"precompute_reference": value, "tokens": tokens}).performance
        for value in (False, True)
    )
    assert beside.duration_seconds == pytest.approx(2 * beside.step_seconds)
    assert ahead.step_seconds < beside.step_seconds
    assert ahead.duration_seconds == pytest.approx(beside.duration_seconds)
    timed = {"precompute_reference": True, "time_budget_seconds": ahead.duration_seconds}
    found = asked("dpo", workload=timed).performance
    assert found.trained_tokens == pytest.approx(tokens)


def test_comparing_answers_never_costs_less_than_supervised_steps_of_as_many_records():
    for method, recompute in product(METHODS, ("none", "full")):
        plain = {"model": LLAMA_8B, "strategy": {"activation_recomputation": recompute}}
        base = asked(method=method, **plain)
        for objective in ("dpo", "kto", "orpo"):
            found, ahead = (
                asked(objective, method, workload={"precompute_reference": value}, **plain)
                if objective != "orpo"
                else asked(objective, method, **plain)
                for value in (False, True)
            )
            case = (method, recompute, objective)
            assert peak(base) <= peak(ahead) <= peak(found), case
            assert seconds(base) < seconds(ahead) <= seconds(found), case


def peak(found):
    return found.memory.per_device_peak_bytes


def seconds(found):
    return found.performance.step_seconds


def test_who_names_no_engine_gets_one_that_compares_answers():
    assert asked("dpo", engine=None).engine == "trl"
    assert asked(engine=None).engine == "torch"
    for engine in (None, "auto", "trl"):
        work = training("orpo", "lora")["workload"]
        assert {
            plan.engine for plan in search(engine=engine, model=TINY, workload=work).plans
        } == {"trl"}


REFUSED = [
    ({"engine": "torch"}, "engine", "set engine to trl"),
    ({"engine": "deepspeed"}, "engine", "set engine to trl"),
    ({"strategy": {"packed": True}}, "strategy.packed", "a row of its own"),
    ({"method": "lomo"}, "workload.objective", "full, lora or qlora; it is lomo"),
    ({"method": "pretrain"}, "workload.objective", "starts from a trained model"),
    ({"objective": "reward", "method": "qlora"}, "workload.method", "choose lora or full"),
    (
        {"objective": "kto", "workload": {"global_batch_size": 1}},
        "workload.global_batch_size",
        "choose at least 2",
    ),
    (
        {"objective": "kto", "strategy": {"micro_batch_size": 1}},
        "strategy.micro_batch_size",
        "micro_batch_size is 1: kto compares the answers",
    ),
    ({"workload": {"length_schedule": [[256, 1.0]]}}, "workload.length_schedule", "leave it out"),
]


@pytest.mark.parametrize(("fields", "field", "words"), REFUSED)
def test_what_no_trainer_of_comparisons_has_is_refused_by_name(fields, field, words):
    with pytest.raises((PlannerError, ValueError)) as refused:
        asked(**{"objective": "dpo", **fields})
    assert words in str(refused.value)
    assert getattr(refused.value, "field", field) == field


def test_rated_answers_are_planned_in_micro_batches_of_two_or_more():
    for batch, least in ((8, 2), (9, 3)):
        work = training("kto", workload={"global_batch_size": batch})["workload"]
        question = TrainWorkload.model_validate(work)
        sizes = {s for s in range(1, batch + 1) if rules_mask(batch_rules(question, 1, s))}
        assert min(sizes) == least
        (best,) = search(model=TINY, workload=work, top=1).plans
        assert best.strategy.micro_batch_size in sizes


def test_a_reward_model_is_never_offered_over_four_bits():
    work = {**training("reward", "lora")["workload"], "sequence_length": 1024}
    small = {**CARD, "id": "small", "memory_bytes": 10 * 1024**3}
    found = search(workload=work, device=small)
    assert not found.plans
    assert not [each.title for each in found.suggestions if "qlora" in each.title]


def test_a_reference_needs_an_objective_that_has_one():
    with pytest.raises(ValueError, match="only dpo and kto have a reference"):
        asked("orpo", workload={"precompute_reference": True})


def test_what_does_not_fit_in_full_names_the_ways_that_do():
    """Llama 3.1 8B: 16 bits of states and a reference exceed one card, adapters do not."""
    work = {"kind": "train", "sequence_length": 1024, "global_batch_size": 4, "objective": "dpo"}
    found = search(workload={**work, "method": "full"})
    assert not found.plans
    offered = {each.title for each in found.suggestions}
    assert "method lora" in offered
    assert not {title for title in offered if "DeepSpeed" in title or "lomo" in title}
    small = {"id": "small", **{key: CARD[key] for key in CARD if key != "id"}}
    small["memory_bytes"] = 16 * 1024**3
    narrow = search(workload={**work, "method": "lora"}, device=small)
    assert not narrow.plans
    (way,) = (each for each in narrow.suggestions if each.title == "method qlora")
    assert way.estimate.fits
    assert way.estimate.engine == "trl"


def test_a_reference_that_does_not_fit_may_answer_before_the_steps():
    """Llama 3.1 8B in fp32 with AdamW: 161 GB of states and copies, and 32 GB of a reference."""
    work = training("dpo", workload={"sequence_length": 256})["workload"]
    found = search(device={**CARD, "memory_bytes": 190_000_000_000}, workload=work)
    assert not found.plans
    (way,) = (each for each in found.suggestions if each.title.startswith("reference"))
    assert way.estimate.fits
    assert "reference_weights" not in way.estimate.memory.breakdown_bytes


def test_no_supervised_trainers_configuration_is_offered_for_it():
    plans = search(model=TINY, workload=training("dpo", "lora")["workload"]).plans
    assert {plan.exports for plan in plans} == {()}
