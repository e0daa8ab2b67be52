"""Training: steps against published runs, their formulas, whole runs and thrifty exchanges."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from planner.catalog.engines import COMMON_TRAINING, get_engine
from planner.catalog.models import get_model
from planner.catalog.reading import data_json
from planner.cost.parameters import count_parameters
from planner.cost.training import (
    exposed_seconds,
    output_widths,
    pipeline_in_flight,
    scale_parameters,
    step_seconds,
)
from planner.fitting.evidence import cluster_of, strategy_of, table, training_request, usable
from planner.fitting.published_speeds import factors_by_part, step_factors
from planner.fitting.step_fitting import (
    PARTS,
    TOGETHER,
    StepCase,
    descend,
    fit_levels,
    fit_pooled,
    median_error,
    step_case,
)
from planner.specs.base import NotPossibleError
from planner.specs.cluster import ClusterSpec, DeviceSpec
from planner.specs.estimate import EstimateRequest
from planner.specs.workload import TrainWorkload
from planner.workload.costing import estimate_request
from tests.planner.asking import CPU, LLAMA_8B, LLAMA_70B, MIXTRAL, TINY, TRAIN, ask, held


def training(devices=8, method="full", **strategy):
    return ask(
        devices=devices, workload={**TRAIN, "method": method}, strategy=strategy, engine="megatron"
    )


def test_flop_and_tokens_of_a_step_are_those_of_its_parameters_and_speed():
    found = training()
    parameters = count_parameters(get_model(LLAMA_8B)).total
    per_token = (
        found.performance.model_flops_per_second_per_device
        * 8
        / found.performance.tokens_per_second
    )
    assert per_token / (6 * parameters) == pytest.approx(1.0, abs=0.1)

    found = training().performance
    assert found.tokens_per_second * found.step_seconds == pytest.approx(16 * 2048)
    assert 0.2 < training().performance.mfu < 1.0


def test_a_bubble_is_p_minus_one_micro_batches_and_shrinks_with_more():
    few = training(pipeline_parallel_size=4, data_parallel_size=2, micro_batch_size=4)
    many = training(pipeline_parallel_size=4, data_parallel_size=2, micro_batch_size=1)
    assert few.performance.bubble_ratio > many.performance.bubble_ratio > 0
    assert training().performance.bubble_ratio == 0

    # With m micro-batches on p stages the bubble is (p-1)/(m+p-1) of the pipelined part.
    #
    # A little less here: the last stage holds the head, and an exchange and an update follow.
    found = training(pipeline_parallel_size=4, data_parallel_size=2, micro_batch_size=1)
    assert found.performance.bubble_ratio == pytest.approx(3 / (8 + 3), rel=0.2)


def test_recomputation_costs_a_third_more_and_adapters_skip_frozen_gradients():
    # The product with the vocabulary, 6.9 % of the parameters, runs forward once.
    kept = training(activation_recomputation="none").time_breakdown_seconds["train_step"]
    redone = training(activation_recomputation="full").time_breakdown_seconds["train_step"]
    assert redone["compute"] / kept["compute"] == pytest.approx(4 / 3, rel=0.02)
    full = training().time_breakdown_seconds["train_step"]
    lora = training(method="lora").time_breakdown_seconds["train_step"]
    assert lora["compute"] / full["compute"] == pytest.approx(2 / 3)


def test_one_rank_exchanges_nothing_and_slow_links_expose_gradients():
    found = ask(workload=TRAIN, engine="megatron")
    assert found.performance.communication_ratio == 0
    cluster = {"device": "h100", "devices_per_node": 1, "nodes": 8}
    slow = {**cluster, "inter_node_bandwidth_bytes_per_second": 1e9}
    near = ask(cluster=cluster, workload=TRAIN, engine="megatron")
    far = ask(cluster=slow, workload=TRAIN, engine="megatron")
    assert far.performance.communication_ratio > near.performance.communication_ratio


def test_a_run_has_its_duration_and_our_own_trainer_takes_the_whole_batch():
    tokens = 16 * 2048 * 100
    found = ask(devices=8, workload={**TRAIN, "tokens": tokens}, engine="megatron").performance
    assert found.duration_seconds == pytest.approx(100 * found.step_seconds)
    found = ask(model=TINY, device=CPU, workload={**TRAIN, "sequence_length": 256})
    assert found.strategy.micro_batch_size == 16
    assert found.strategy.gradient_accumulation_steps == 1


def test_autocast_keeps_wide_weights_and_narrow_activations():
    workload = {**TRAIN, "sequence_length": 256, "global_batch_size": 8}
    wide = ask(model=TINY, device=CPU, workload=workload, strategy={"compute_dtype": "fp32"})
    mixed = ask(model=TINY, device=CPU, workload=workload, strategy={"compute_dtype": "bf16"})
    weights = (wide.memory.breakdown_bytes["weights"], mixed.memory.breakdown_bytes["weights"])
    assert weights[0] == weights[1]
    assert mixed.memory.breakdown_bytes["activations"] < wide.memory.breakdown_bytes["activations"]
    assert mixed.memory.breakdown_bytes["buffers"] > 0


def test_a_batch_or_micro_batch_that_does_not_divide_is_refused_with_its_numbers():
    with pytest.raises(NotPossibleError, match="global_batch_size is 16"):
        training(devices=3, data_parallel_size=3)
    with pytest.raises(NotPossibleError, match="micro_batch_size is 3"):
        training(micro_batch_size=3, data_parallel_size=1)


ENGINES = data_json("factors.json")["engines"]
RUN = {"kind": "train", "sequence_length": 4096, "global_batch_size": 64, "method": "pretrain"}


def rows(source):
    found = usable(table("training"))
    return [row for row in found if row["source_id"] == source and row["step_seconds"]]


def predicted_s(row):
    asked = EstimateRequest.model_validate(training_request(row))
    return estimate_request(asked, explain=False).performance.step_seconds


def errors(source):
    return [abs(predicted_s(row) / float(row["step_seconds"]) - 1) for row in rows(source)]


def test_published_steps_are_met_by_the_linear_form_and_operators_hide_behind_work():
    for source, bound in (
        ("llm-foundry", 0.05), ("narayanan2021-t1", 0.10), ("narayanan2021-t2", 0.13),
        ("megatron-lm-llama-readme", 0.06), ("aleph-alpha", 0.06), ("bigscience-tr11", 0.04),
        ("korthikanti2022", 0.035),
    ):  # fmt: skip
        assert np.median(errors(source)) < bound, (source, bound)

    for row in rows("llm-foundry")[::25]:
        one = step_case(row)
        kept = ENGINES["llm_foundry"]["training_factors"][one.device]
        factors = np.array([kept[part] for part in PARTS])
        assert one.step_s(factors) == pytest.approx(predicted_s(row), rel=1e-5)

    hidden = case({"matmul": 3.0, "issue": 2.0}, 3.0, runs_ahead=True)
    shown = case({"matmul": 3.0, "issue": 5.0}, 5.0, runs_ahead=True)
    ones = np.ones(len(PARTS))
    assert hidden.step_s(ones) == 3.0
    assert shown.step_s(ones) == 5.0


def case(seconds, measured, *, runs_ahead=False):
    own = np.zeros(len(PARTS))
    for part, value in seconds.items():
        own[PARTS.index(part)] = value
    return StepCase("r", "e", "ampere", "a100", "s", "s/m", own, runs_ahead, measured)


def fit_step(cases):
    return fit_levels(cases, TOGETHER).factors("e", "ampere", "a100")


def test_runs_move_the_factor_that_explains_them_and_leave_others_at_the_prior():
    assert list(fit_step([])) == [1.0] * len(PARTS)
    slow = [case({"matmul": scale}, 2 * scale) for scale in (1.0, 2.0, 3.0, 5.0)]
    assert fit_step(slow)[PARTS.index("matmul")] == pytest.approx(2.0, abs=0.02)
    slow = [case({"matmul": scale}, 2 * scale) for scale in (1.0, 2.0, 3.0)]
    assert fit_step(slow)[PARTS.index("tensor_parallel")] == 1.0


def test_no_fit_beats_the_peak_or_its_floors():
    fast = [case({"matmul": scale, "attention": scale}, scale / 9) for scale in (1.0, 2.0)]
    found = dict(zip(PARTS, fit_step(fast), strict=True))
    assert (found["matmul"], found["attention"]) == pytest.approx((0.7, 1.0), rel=1e-6)
    for engine in [name for name in ENGINES if "training_factors" in ENGINES[name]]:
        for family in ENGINES[engine]["training_factors"].values():
            assert family["matmul"] >= 0.7, engine
            assert set(family) == set(PARTS), engine
    assert descend(lambda x: float(x.sum()), np.ones(2), np.ones(2), 0.5) == pytest.approx(0.5)


def test_runners_do_not_speak_for_training_engines_that_nobody_measured():
    runner = case({"matmul": 1.0}, 9.0, runs_ahead=True)
    assert fit_pooled([runner]).effects == {}
    cases = [case({"matmul": 1.0}, measured) for measured in (0.8, 1.0, 2.0)]
    assert median_error(cases, np.ones(len(PARTS))) == pytest.approx(0.25)
    shared = ENGINES[COMMON_TRAINING]["training_factors"]
    assert get_engine("torchtitan", "gpu").trained_on == ()
    assert get_engine("torchtitan", "gpu").training_factors == shared
    assert get_engine("torchtitan", "cpu").training_factors == {}


def test_factors_are_kept_by_chip_and_architecture():
    def factors(family, chip):
        return np.full(len(PARTS), 1.0 + bool(family) + bool(chip))

    found = step_factors([case({"matmul": 1.0}, 1.0)], factors)

    assert set(found) == {"any", "ampere", "a100"}
    assert found["any"] == factors_by_part(np.ones(len(PARTS)))
    assert found["a100"]["matmul"] == 3.0

    for chip, architecture in (
        ("a100-sxm-80gb", "ampere"), ("h200-sxm-141gb", "hopper"), ("gb300-nvl72", "blackwell"),
        ("v100-sxm2-16gb", "volta"), ("mi300x", "mi300x"),
    ):  # fmt: skip
        device = DeviceSpec(id=chip, memory_bytes=1, memory_bandwidth_bytes_per_second=1.0)
        assert device.architecture == architecture, (chip, architecture)


def test_interleaving_exchanges_and_first_stages_cost_what_is_published():
    plain = {"micro_batches": 8, "stages": 4, "micro_batch_s": 1.0, "exposed_s": 0, "update_s": 0}
    assert step_seconds(**plain) == 11
    assert step_seconds(**plain, chunks=3) == 9

    for links, window, expected in ((2.0, 5.0, 0.2), (5.0, 2.0, 3.2), (0.0, 2.0, 0.0)):
        found = exposed_seconds(links_s=links, window_s=window, tax_ratio=0.1)
        assert found == pytest.approx(expected), (links, window, expected)

    # arXiv:2205.05198, section 4.2.3: 1 + (p-1)/(p m) times the plain schedule's.
    held = pipeline_in_flight("interleaved", 0, 8, 64, 3)
    assert held == pytest.approx(8 * (1 + 7 / (8 * 3)))


def test_context_ranks_recomputation_and_remote_experts_cost_what_they_exchange():
    strategy = {"data_parallel_size": 1, "context_parallel_size": 8, "zero_stage": 3}
    split = ask(devices=8, workload=RUN, strategy=strategy, engine="megatron")
    alone = ask(workload=RUN, strategy={}, engine="megatron")
    kept = split.memory.breakdown_bytes["activations"]
    assert kept == pytest.approx(alone.memory.breakdown_bytes["activations"] / 8, rel=1e-6)
    assert split.performance.step_seconds < alone.performance.step_seconds / 2.5

    seconds = [
        ask(
            workload=RUN, strategy={"activation_recomputation": how}, engine="megatron"
        ).performance.step_seconds
        for how in ("none", "selective", "full")
    ]
    assert seconds[0] < seconds[1] < seconds[2]

    names = []
    for ranks in (1, 8):
        strategy = {"expert_parallel_size": ranks, "zero_stage": 1}
        found = ask(model=MIXTRAL, devices=8, workload=RUN, strategy=strategy, engine="megatron")
        names.append({term.name for term in found.terms})
    assert "Expert all-to-all" not in names[0]
    assert "Expert all-to-all" in names[1]


def test_states_of_an_expert_are_sharded_over_the_ranks_that_hold_a_copy_of_it():
    counts = count_parameters(get_model(MIXTRAL))
    dense = counts.total - counts.experts
    each = 12  # fp32 weights and two moments
    for nodes, experts, copies in ((1, 8, 1), (2, 8, 2), (1, 4, 2)):
        found = ask(
            model=MIXTRAL,
            devices=8 * nodes,
            workload=RUN,
            strategy={"expert_parallel_size": experts, "zero_stage": 1},
            engine="megatron",
        )
        states = each * (dense / (8 * nodes) + counts.experts / experts / copies)
        assert held(found, "optimizer_states") == pytest.approx(states, rel=1e-3), experts


def test_gathering_shards_is_paid_for_each_micro_batch():
    def links(accumulation):
        strategy = {"zero_stage": 3, "gradient_accumulation_steps": accumulation}
        found = ask(
            model=LLAMA_70B, devices=8, workload=RUN, strategy=strategy, engine="llm_foundry"
        )
        return sum(term.value for term in found.terms if term.name == "Gathering weight shards")

    assert links(8) == pytest.approx(8 * links(1), rel=1e-3)


def test_scores_move_through_memory_only_without_flash_attention():
    moved = [
        [
            term.value
            for term in ask(workload=RUN, strategy={"attention": how}, engine="megatron").terms
            if term.name == "Scores through memory"
        ]
        for how in ("flash", "eager")
    ]

    assert moved[0] == []
    assert moved[1][0] > 0


def test_a_rows_precision_is_what_its_products_run_in():
    for precision, compute in (
        ("fp8", "fp8"), ("mxfp8", "fp8"), ("nvfp4", "nvfp4"), ("bf16", "bf16"), ("", None),
    ):  # fmt: skip
        row = {**table("training")[0], "precision": precision}
        assert strategy_of(row).get("compute_dtype") == compute, (precision, compute)


def test_a_racks_nvlink_spans_its_trays():
    row = next(row for row in table("training") if row["gpu"] == "GB200-NVL72")
    cluster = ClusterSpec.model_validate(cluster_of({**row, "num_gpus": "64"}))
    assert (cluster.devices_per_node, cluster.nodes, cluster.domain_devices) == (4, 16, 64)


few = settings(max_examples=20, deadline=None)
SLOW = {"device": "a100-sxm4-80gb", "nodes": 4, "inter_node_bandwidth_bytes_per_second": 1e9}
PRETRAIN = {**TRAIN, "method": "pretrain", "tokens": 1_000_000_000}
SMALL = {"model": "EleutherAI/pythia-160m", "engine": "llm_foundry"}


def run(**workload):
    return ask(**SMALL, workload={**PRETRAIN, **workload}).performance


def exchanging(**strategy):
    strategy = {"micro_batch_size": 1, **strategy}
    return ask(cluster=SLOW, workload=TRAIN, engine="megatron", strategy=strategy)


def test_schedules_and_budgets_change_times_and_tokens_and_nothing_else():
    plain, scheduled = run(), run(length_schedule=[[2048, 1.0]])
    assert scheduled.duration_seconds == pytest.approx(plain.duration_seconds)
    with pytest.raises(ValidationError, match=r"add up to 0\.75, not 1"):
        TrainWorkload(**PRETRAIN, length_schedule=[[128, 0.25], [256, 0.5]])
    with pytest.raises(ValidationError, match="reaches 4096 tokens"):
        TrainWorkload(**PRETRAIN, length_schedule=[[4096, 1.0]])

    schedule = {"length_schedule": [[128, 0.5], [2048, 0.5]]}
    plain = ask(**SMALL, workload=PRETRAIN)
    grown = ask(**SMALL, workload={**PRETRAIN, **schedule})
    assert grown.memory == plain.memory
    assert grown.performance.step_seconds == plain.performance.step_seconds

    found = run(time_budget_seconds=86_400, tokens=None)
    assert found.duration_seconds == 86_400
    assert found.trained_tokens == pytest.approx(86_400 * found.tokens_per_second)
    assert run().trained_tokens is None


@few
@given(share=st.floats(0.01, 1.0), length=st.sampled_from([128, 256, 512, 1024]))
def test_shorter_sequences_first_never_take_longer(share, length):
    schedule = [[length, share], [2048, 1.0 - share]]
    assert run(length_schedule=schedule).duration_seconds <= run().duration_seconds * (1 + 1e-9)


@few
@given(padding=st.floats(0.0, 0.9))
def test_only_text_counts_as_trained(padding):
    padded = run(padding_ratio=padding)
    assert padded.tokens_per_second == pytest.approx(run().tokens_per_second * (1 - padding))
    assert padded.step_seconds == run().step_seconds


@few
@given(padding=st.sampled_from([0.1, 0.25, 0.5, 0.75]))
def test_packing_takes_the_padding_out_of_work_and_memory(padding):
    workload = {**PRETRAIN, "padding_ratio": padding}
    padded, packed = (
        ask(**SMALL, workload=workload, strategy={"packed": how, "micro_batch_size": 4})
        for how in (False, True)
    )

    assert held(packed, "activations") == pytest.approx(
        held(padded, "activations") * (1 - padding), rel=1e-6
    )
    assert packed.performance.tokens_per_second > padded.performance.tokens_per_second


def test_packing_a_batch_without_padding_changes_nothing():
    plain, packed = (
        ask(**SMALL, workload=PRETRAIN, strategy={"packed": how}) for how in (False, True)
    )
    assert packed.performance == plain.performance


@few
@given(ratio=st.floats(1.0, 100.0))
def test_smaller_gradients_never_slow_a_step(ratio):
    plain, squeezed = exchanging(), exchanging(gradient_compression_ratio=ratio)
    assert squeezed.performance.step_seconds <= plain.performance.step_seconds
    assert squeezed.memory == plain.memory


def test_gradients_are_compressed_by_interval_or_ratio_and_never_grow():
    squeezed, rare = (
        exchanging(**{name: 8})
        for name in ("gradient_compression_ratio", "synchronization_interval_steps")
    )
    assert rare.performance == squeezed.performance

    plain = ask(workload=TRAIN, engine="megatron")
    squeezed = ask(workload=TRAIN, engine="megatron", strategy={"gradient_compression_ratio": 4})
    assert squeezed.performance == plain.performance
    with pytest.raises(ValidationError):
        exchanging(gradient_compression_ratio=0.5)


def test_rounding_weights_takes_time_and_integer_states_a_byte_each():
    plain = ask(workload=TRAIN, engine="deepspeed")
    rounded = ask(workload=TRAIN, engine="deepspeed", strategy={"quantization": "qat"})
    assert rounded.performance.step_seconds > plain.performance.step_seconds
    assert rounded.memory == plain.memory
    found = ask(workload={**TRAIN, "method": "qft"}, engine="deepspeed")
    assert held(found, "gradients") == held(found, "weights") == held(found, "optimizer_states")
    assert found.strategy.gradient_dtype == found.strategy.weight_dtype == "int8"


def test_scales_are_one_per_output_row_and_hold_hardly_any_states():
    model = get_model(LLAMA_8B)
    rows = 2 * 4096 + 2 * 1024 + 2 * 14336 + 4096
    assert output_widths(model) == rows
    assert scale_parameters(num_layers=32, outputs=rows) == 32 * rows

    scales = ask(workload={**TRAIN, "method": "alphatuning"}, engine="deepspeed")
    full = ask(workload=TRAIN, engine="deepspeed")
    assert scales.strategy.weight_dtype == "int4"
    assert held(scales, "optimizer_states") < held(full, "optimizer_states") / 1000
    assert held(scales, "adapters") == 2 * 32 * output_widths(get_model(LLAMA_8B))
