"""Training steps against published runs, and the formulas that their parts come from."""

import numpy as np
import pytest

from planner.catalog.engines import COMMON_TRAINING, get_engine
from planner.catalog.reading import data_json
from planner.cost.training import exposed_seconds, pipeline_in_flight, step_seconds
from planner.fitting.evidence import cluster_of, strategy_of, table, training_request, usable
from planner.fitting.factors import named, step_factors
from planner.fitting.robust_fit import descend
from planner.fitting.step_fitting import (
    PARTS,
    TOGETHER,
    StepCase,
    fit_levels,
    median_error,
    pooled,
    step_case,
)
from planner.specs.cluster import DeviceSpec
from planner.specs.estimate import EstimateRequest
from planner.workload.estimator import estimate_request
from tests.planner.asking import LLAMA_70B, MIXTRAL, ask

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


@pytest.mark.parametrize(
    ("source", "bound"),
    [
        ("llm-foundry", 0.05),
        ("narayanan2021-t1", 0.10),
        ("narayanan2021-t2", 0.13),
        ("megatron-lm-llama-readme", 0.06),
        ("aleph-alpha", 0.06),
        ("bigscience-tr11", 0.04),
        ("korthikanti2022", 0.035),
    ],
)
def test_published_steps_are_met_within_a_median_error(source, bound):
    assert np.median(errors(source)) < bound


def test_the_linear_form_of_a_step_equals_the_planners_answer():
    for row in rows("llm-foundry")[::25]:
        case = step_case(row)
        kept = ENGINES["llm_foundry"]["training_factors"][case.device]
        factors = np.array([kept[part] for part in PARTS])

        assert case.step_s(factors) == pytest.approx(predicted_s(row), rel=1e-5)


def case(seconds, measured, *, runs_ahead=False):
    own = np.zeros(len(PARTS))
    for part, value in seconds.items():
        own[PARTS.index(part)] = value
    return StepCase("r", "e", "ampere", "a100", "s", "s/m", own, runs_ahead, measured)


def fit_step(cases):
    return fit_levels(cases, TOGETHER).factors("e", "ampere", "a100")


def test_issuing_operators_hides_behind_work_where_kernels_run_ahead():
    hidden = case({"matmul": 3.0, "issue": 2.0}, 3.0, runs_ahead=True)
    shown = case({"matmul": 3.0, "issue": 5.0}, 5.0, runs_ahead=True)
    ones = np.ones(len(PARTS))

    assert hidden.step_s(ones) == 3.0
    assert shown.step_s(ones) == 5.0


def test_without_runs_the_factors_are_the_prior():
    assert list(fit_step([])) == [1.0] * len(PARTS)


def test_many_runs_move_the_factor_that_explains_them():
    slow = [case({"matmul": scale}, 2 * scale) for scale in (1.0, 2.0, 3.0, 5.0)]

    assert fit_step(slow)[PARTS.index("matmul")] == pytest.approx(2.0, abs=0.02)


def test_a_part_that_no_run_has_keeps_its_prior():
    slow = [case({"matmul": scale}, 2 * scale) for scale in (1.0, 2.0, 3.0)]

    assert fit_step(slow)[PARTS.index("tensor_parallel")] == 1.0


def test_no_fit_lets_a_product_beat_the_peak_or_attention_a_product():
    fast = [case({"matmul": scale, "attention": scale}, scale / 9) for scale in (1.0, 2.0)]
    found = dict(zip(PARTS, fit_step(fast), strict=True))

    assert (found["matmul"], found["attention"]) == pytest.approx((0.7, 1.0), rel=1e-6)


@pytest.mark.parametrize(
    "engine", [name for name in ENGINES if "training_factors" in ENGINES[name]]
)
def test_every_fitted_product_stays_below_the_peak(engine):
    for family in ENGINES[engine]["training_factors"].values():
        assert family["matmul"] >= 0.7
        assert set(family) == set(PARTS)


def test_a_descent_stays_above_its_floors():
    assert descend(lambda x: float(x.sum()), np.ones(2), np.ones(2), 0.5) == pytest.approx(0.5)


def test_runners_do_not_speak_for_training_engines():
    runner = case({"matmul": 1.0}, 9.0, runs_ahead=True)

    assert pooled([runner]).effects == {}


def test_factors_are_kept_by_chip_and_for_all_chips():
    def factors(family, chip):
        return np.full(len(PARTS), 1.0 + bool(family) + bool(chip))

    found = step_factors([case({"matmul": 1.0}, 1.0)], factors)

    assert set(found) == {"any", "ampere", "a100"}
    assert found["any"] == named(np.ones(len(PARTS)))
    assert found["a100"]["matmul"] == 3.0


def test_the_median_error_is_of_absolute_values():
    cases = [case({"matmul": 1.0}, measured) for measured in (0.8, 1.0, 2.0)]

    assert median_error(cases, np.ones(len(PARTS))) == pytest.approx(0.25)


def test_an_engine_that_nobody_measured_takes_what_training_engines_share():
    shared = ENGINES[COMMON_TRAINING]["training_factors"]
    assert get_engine("torchtitan", "gpu").trained_on == ()

    assert get_engine("torchtitan", "gpu").training_factors == shared
    assert get_engine("torchtitan", "cpu").training_factors == {}


@pytest.mark.parametrize(
    ("chip", "architecture"),
    [
        ("a100-sxm-80gb", "ampere"),
        ("h200-sxm-141gb", "hopper"),
        ("gb300-nvl72", "blackwell"),
        ("v100-sxm2-16gb", "volta"),
        ("mi300x", "mi300x"),
    ],
)
def test_a_chip_belongs_to_an_architecture(chip, architecture):
    device = DeviceSpec(id=chip, memory_bytes=1, memory_bandwidth_bytes_per_second=1.0)

    assert device.architecture == architecture


def test_interleaving_divides_the_bubble():
    plain = {"micro_batches": 8, "stages": 4, "micro_batch_s": 1.0, "exposed_s": 0, "update_s": 0}

    assert step_seconds(**plain) == 11
    assert step_seconds(**plain, chunks=3) == 9


@pytest.mark.parametrize(
    ("links", "window", "expected"), [(2.0, 5.0, 0.2), (5.0, 2.0, 3.2), (0.0, 2.0, 0.0)]
)
def test_an_exchange_costs_what_sticks_out_and_a_tax(links, window, expected):
    found = exposed_seconds(links_s=links, window_s=window, tax_ratio=0.1)

    assert found == pytest.approx(expected)


def test_an_interleaved_first_stage_holds_more_as_korthikanti_says():
    """arXiv:2205.05198, section 4.2.3: 1 + (p-1)/(p m) times the plain schedule's."""
    held = pipeline_in_flight("interleaved", 0, 8, 64, 3)

    assert held == pytest.approx(8 * (1 + 7 / (8 * 3)))


def test_context_parallel_ranks_share_the_tokens_and_the_devices():
    strategy = {"data_parallel_size": 1, "context_parallel_size": 8, "zero_stage": 3}
    split = ask(devices=8, workload=RUN, strategy=strategy, engine="megatron")
    alone = ask(workload=RUN, strategy={}, engine="megatron")

    kept = split.memory.breakdown_bytes["activations"]
    assert kept == pytest.approx(alone.memory.breakdown_bytes["activations"] / 8, rel=1e-6)
    assert split.performance.step_seconds < alone.performance.step_seconds / 2.5


def test_selective_recomputation_costs_less_than_full():
    seconds = [
        ask(
            workload=RUN, strategy={"activation_recomputation": how}, engine="megatron"
        ).performance.step_seconds
        for how in ("none", "selective", "full")
    ]

    assert seconds[0] < seconds[1] < seconds[2]


def test_sending_tokens_to_experts_of_other_ranks_takes_time():
    names = []
    for ranks in (1, 8):
        strategy = {"expert_parallel_size": ranks, "zero_stage": 1}
        found = ask(model=MIXTRAL, devices=8, workload=RUN, strategy=strategy, engine="megatron")
        names.append({term.name for term in found.terms})

    assert "Expert all-to-all" not in names[0]
    assert "Expert all-to-all" in names[1]


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


@pytest.mark.parametrize(
    ("precision", "compute"),
    [("fp8", "fp8"), ("mxfp8", "fp8"), ("nvfp4", "nvfp4"), ("bf16", "bf16"), ("", None)],
)
def test_a_rows_precision_is_what_its_products_run_in(precision, compute):
    row = {**table("training")[0], "precision": precision}

    assert strategy_of(row).get("compute_dtype") == compute


def test_a_racks_nvlink_spans_its_trays():
    row = next(row for row in table("training") if row["gpu"] == "GB200-NVL72")

    assert cluster_of({**row, "num_gpus": "64"})["nodes"] == 1
