"""Distillation: a student answers prompts, and a frozen teacher says how likely each token is."""

import pytest

from planner.catalog.models import get_model
from planner.specs.base import PlannerError
from planner.specs.workload import TrainWorkload
from tests.planner.asking import CARD, TINY, ask, held, search
from tests.planner.test_preference import LINEAR, NORMS, TABLE, WEIGHTS

LENGTH, BATCH = 512, 16
DEEPER = {**TINY, "num_hidden_layers": 12}
OF_DEEPER = 2 * LINEAR + 2 * TABLE + (2 * 12 + 1) * 256  # weights: twice the layers
WORK = {
    "kind": "train",
    "objective": "distillation",
    "teacher_model": DEEPER,
    "sequence_length": LENGTH,
    "max_completion_length": 256,
    "global_batch_size": BATCH,
}
MICRO = 2
PHASES = ("rollout", "teacher", "update", "weight_sync")


def asked(devices=1, strategy=None, engine="trl", **workload):
    chosen = {"micro_batch_size": MICRO, "weight_dtype": "bf16", **(strategy or {})}
    chosen.setdefault("rollout", {"engine": "transformers"})
    return ask(model=TINY, device=CARD, devices=devices, engine=engine,
               workload={**WORK, **workload}, strategy=chosen)  # fmt: skip


def terms(**fields):
    return {term.name: term.value for term in asked(**fields).terms}


def test_a_teacher_is_held_once_in_16_bits_whatever_is_trained_and_split_as_the_student():
    assert (WEIGHTS, OF_DEEPER) == (LINEAR + 2 * TABLE + NORMS, WEIGHTS + LINEAR + 12 * 256)
    for method in ("full", "lora", "qlora"):
        strategy = {"weight_dtype": None} if method == "qlora" else {}
        found = asked(method=method, strategy=strategy)
        assert held(found, "reference_weights") == 2 * OF_DEEPER, method
    for stage, shards in ((2, 1), (3, 4)):
        layout = {"data_parallel_size": 4, "zero_stage": stage}
        found = held(asked(devices=4, strategy=layout), "reference_weights")
        assert found == pytest.approx(2 * OF_DEEPER / shards, abs=1), stage
    assert terms()["Teacher weights"] == 2 * OF_DEEPER


def test_zero_3_gathers_the_teacher_for_every_micro_batch():
    wide = {**TINY, "hidden_size": 2048, "num_hidden_layers": 12}
    found = {}
    for stage in (2, 3):
        layout = {"data_parallel_size": 4, "zero_stage": stage}
        found[stage] = asked(devices=4, strategy=layout, teacher_model=wide)
        named = {term.name: term.value for term in found[stage].terms}
        assert ("Teacher forward: gathering weight shards" in named) == (stage == 3)
    total = named["Teacher weights"] * 4
    layers = total - 2 * 2 * 4096 * 2048
    assert held(found[3], "buffers") >= 2 * layers / 12  # one layer, and one ahead
    links = {at: each.time_breakdown_seconds["teacher"].get("communication", 0.0)
             for at, each in found.items()}  # fmt: skip
    assert links[3] > links[2]


def test_the_loss_holds_tiles_of_both_models_in_fp32_and_no_whole_logits():
    tokens = MICRO * LENGTH
    by_hand = tokens * 4096 * (2 * 4 + 2) + 4 * 256 * (tokens + 4096)
    assert terms()["Logits in the loss"] == by_hand
    peak = asked(teacher_model={**TINY, "hidden_size": 8192}).memory.breakdown_bytes["activations"]
    assert peak > asked().memory.breakdown_bytes["activations"]  # in the teacher's forward pass


def test_a_step_generates_lets_the_teacher_read_and_updates():
    found = asked()
    spent = {name: sum(found.time_breakdown_seconds[name].values()) for name in PHASES}
    assert sum(spent.values()) == pytest.approx(found.performance.step_seconds)
    assert sum(found.time_breakdown_seconds["log_probs"].values()) == 0
    assert "reward_model" not in found.time_breakdown_seconds
    rewarded = asked(objective="grpo", teacher_model=None, num_generations=2)
    update = sum(rewarded.time_breakdown_seconds["update"].values())
    assert spent["update"] == pytest.approx(update)


def test_a_teacher_multiplies_as_a_forward_pass_of_its_size():
    for teacher, layers in ((TINY, 1), (DEEPER, 2)):
        told = terms(teacher_model=teacher)
        own = told["Matrix products: forward, backward, recomputation"] / 4  # of four passes
        read = told["Teacher forward: Matrix products"]
        assert read == pytest.approx(own * layers), layers


def test_a_search_names_the_teacher_by_the_catalog():
    work = {**WORK, "teacher_model": "Qwen/Qwen3-8B", "sequence_length": 1024}
    best = search(model="Qwen/Qwen3-0.6B", workload=work).plans[0]
    assert best.engine == "trl"
    weights = best.memory.breakdown_bytes["reference_weights"]
    assert weights == pytest.approx(2 * 8.19e9, rel=0.001)


def test_what_is_no_distillation_is_refused_by_its_field():
    small = get_model("Qwen/Qwen3-0.6B")
    for workload, field, said in (
        ({"teacher_model": None}, "teacher_model", "name a larger model with the same vocabulary"),
        ({"teacher_model": {**TINY, "vocab_size": 4224}}, "workload.teacher_model",
         "has 4224 tokens in its vocabulary, custom has 4096"),
        ({"teacher_model": small}, "workload.teacher_model", "has 151936 tokens"),
        ({"teacher_model": {**DEEPER, "max_position_embeddings": LENGTH - 1}},
         "workload.teacher_model", "has a context of 511 tokens"),
        ({"teacher_model": "no/such"}, "workload.teacher_model", "no model of the catalog"),
        ({"num_generations": 4}, "num_generations", "is of the objective grpo"),
        ({"staleness": 1}, "staleness", "is of the objective grpo"),
        ({"reward_model": "Qwen/Qwen3-0.6B"}, "reward_model", "is of the objective grpo"),
        ({"beta": 1.5}, "beta", "lies between 0"),
        ({"objective": "grpo"}, "teacher_model", "is of the objective distillation"),
        ({"max_completion_length": LENGTH}, "max_completion_length", "sequence_length"),
    ):  # fmt: skip
        with pytest.raises((PlannerError, ValueError), match=said) as refused:
            asked(**workload)
        assert field in (getattr(refused.value, "field", None) or str(refused.value)), workload
    with pytest.raises(ValueError, match="choose objective distillation"):
        TrainWorkload(sequence_length=8, global_batch_size=8, teacher_model="Qwen/Qwen3-8B")
    with pytest.raises(PlannerError, match="supervised and grpo alone; set engine to trl"):
        asked(engine="nemo_rl")
    coded = {**WORK, "teacher_model": "Qwen/Qwen3-8B-FP8"}
    with pytest.raises(PlannerError, match="is stored in fp8"):
        ask(model="Qwen/Qwen3-0.6B", workload=coded, engine="trl")
