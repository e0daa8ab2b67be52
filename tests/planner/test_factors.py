"""The factor file: where it comes from, what it changes, and that its fit is the one on disk."""

import numpy as np
import pytest

from planner.catalog.engines import calibration_name, fitted_factors, get_engine
from planner.catalog.reading import data_json
from planner.fitting.evidence import digest, model_of, number, table, training_request, usable
from planner.fitting.factors import INPUTS, by_engine, memory_factors
from planner.fitting.robust_fit import (
    MEMORY_FACTORS,
    descend,
    factors_of,
    fit_memory,
    memory_case,
    memory_regret,
    memory_table,
    prior_of,
)
from planner.specs.estimate import EstimateRequest
from planner.workload.estimator import estimate_request
from tests.planner.asking import ask

FILE = data_json("factors.json")
FULL = {"kind": "train", "sequence_length": 2048, "global_batch_size": 8, "method": "pretrain"}


def memory_rows(engine):
    return [row for row in usable(table("memory")) if row["engine"] == engine]


def fitted_on_file(engine):
    return factors_of(FILE["engines"][engine])


def table_engines():
    return {row["engine"] for row in usable(table("memory_fit"))}


@pytest.fixture(scope="module")
def internevo():
    names = ("memory", "memory_fit")
    rows = [r for n in names for r in usable(table(n)) if r["engine"] == "internevo"]
    return [memory_case(row) for row in rows]


@pytest.mark.parametrize("name", INPUTS)
def test_the_file_names_the_digest_of_each_table_that_it_was_fitted_to(name):
    assert FILE["inputs"][f"{name}.csv"] == digest(name)


def test_an_answer_repeats_the_version_of_the_factors():
    assert calibration_name().startswith(FILE["version"])
    assert ask(workload=FULL, engine="internevo").calibration == calibration_name()


def test_fitting_an_engine_again_gives_the_factors_of_the_file(internevo):
    again = memory_factors(internevo, "internevo")

    kept = FILE["engines"]["internevo"]
    assert again == {name: kept[name] for name in again}


@pytest.mark.parametrize("engine", [e for e in FILE["engines"] if not e.startswith("common")])
def test_every_factor_of_the_file_is_a_field_of_its_engine(engine):
    found = get_engine(engine, "gpu")

    for name, value in FILE["engines"][engine].items():
        kept = getattr(found, name)
        assert (list(kept) if isinstance(kept, tuple) else kept) == value


@pytest.mark.parametrize("kind", ["cpu", "uma", "accelerator"])
def test_what_gpus_measured_says_nothing_about_other_devices(kind):
    assert fitted_factors("megatron", kind, "training") == {}
    assert "training_factors" not in fitted_factors("transformers", kind, "runner")


def test_the_products_own_runner_carries_no_fitted_factor():
    assert "torch" not in FILE["engines"]


@pytest.mark.parametrize("engine", sorted(table_engines()))
def test_the_linear_form_equals_the_planners_answer(engine):
    rows = [row for row in usable(table("memory_fit")) if row["engine"] == engine][:3]
    for row in rows:
        asked = EstimateRequest.model_validate(training_request(row))
        whole = estimate_request(asked, explain=False).memory.per_device_peak_bytes
        factors = fitted_on_file(engine)

        assert memory_case(row).peak_bytes(factors) == pytest.approx(whole, rel=1e-6)


def test_without_rows_the_fit_is_the_prior():
    assert list(fit_memory([])) == list(prior_of([]))


def test_what_only_peaks_can_show_is_nothing_without_them():
    found = dict(zip(MEMORY_FACTORS, fit_memory([]), strict=True))

    assert (found["update_copies"], found["unfilled_ratio"]) == (0.0, 0.0)
    assert found["activation_ratio"] == 1.0


def test_a_fit_never_regrets_more_than_the_prior(internevo):
    priors = np.array([prior for prior, _ in MEMORY_FACTORS.values()])

    assert memory_regret(internevo, fit_memory(internevo)) < memory_regret(internevo, priors)


def test_a_point_that_was_measured_ten_times_counts_once():
    cases = [memory_case(row) for row in memory_rows("litgpt")[:3]]
    once, often = memory_table(cases), memory_table([*cases, *([cases[0]] * 9)])
    priors = np.array([prior for prior, _ in MEMORY_FACTORS.values()])

    assert often.regret(priors) == pytest.approx(once.regret(priors))


def test_sources_of_one_engine_count_alike():
    cases = [memory_case(row) for row in memory_rows("litgpt")]
    weights = memory_table(cases).weights
    shares = {
        source: sum(w for w, case in zip(weights, cases, strict=True) if case.source == source)
        for source in {case.source for case in cases}
    }

    assert len(shares) == 2
    assert np.ptp(list(shares.values())) == pytest.approx(0, abs=1e-9)


def test_descending_finds_the_least_of_a_bowl():
    bowl = descend(
        lambda x: float(np.sum(np.abs(x - np.array([3.0, 0.5])))), np.ones(2), np.ones(2)
    )

    assert bowl == pytest.approx([3.0, 0.5], abs=0.02)


def test_cases_are_grouped_by_engine():
    cases = [memory_case(row) for row in (*memory_rows("litgpt")[:2], *memory_rows("oneflow")[:1])]

    assert {name: len(found) for name, found in by_engine(cases).items()} == {
        "litgpt": 2,
        "oneflow": 1,
    }


def test_rows_that_train_embeddings_beside_adapters_are_left_out():
    kept = {row["row_id"] for row in usable(table("memory"))}
    beside = [row for row in table("memory") if "embedding and output layers" in row["notes"]]

    assert beside
    assert kept.isdisjoint(row["row_id"] for row in beside)


def test_a_row_with_dimensions_becomes_a_model_of_these_dimensions():
    row = next(row for row in table("training") if row["model"] == "gpt-alibi-14400x80")
    found = model_of(row)

    assert (found["hidden_size"], found["num_hidden_layers"]) == (14400, 80)
    assert not found["gated_mlp"]


@pytest.mark.parametrize(("cell", "value"), [("", 7.0), ("2.5", 2.5)])
def test_a_blank_cell_is_the_default(cell, value):
    assert number({"x": cell}, "x", 7.0) == value


@pytest.mark.parametrize("name", ["memory", "memory_fit", "training"])
def test_every_row_of_a_validation_table_names_its_source(name):
    assert all(row["source_id"] and row["source_url_or_repo_path"] for row in table(name))


def test_logits_that_every_rank_gathers_weigh_the_whole_vocabulary():
    engines = ("aleph_alpha_scaling", "torchtitan")
    strategy = {"tensor_parallel_size": 8, "micro_batch_size": 4}
    held = [
        sum(
            term.value
            for term in ask(devices=8, workload=FULL, strategy=strategy, engine=engine).terms
            if term.name == "Logits in the loss"
        )
        for engine in engines
    ]

    ratio = FILE["engines"]["aleph_alpha_scaling"]["loss_ratio"]
    unfused = (2 + 4 * 4) / (2 + 2 * 4)
    assert held[0] == pytest.approx(8 * ratio * unfused * held[1])


def test_states_that_an_engine_keeps_beside_the_known_ones_are_counted():
    row = {"workload": {**FULL, "global_batch_size": 8}, "strategy": {"zero_stage": 0}}
    held = [
        ask(engine=engine, **row).memory.breakdown_bytes["optimizer_states"]
        for engine in ("internevo", "torchtitan")
    ]
    extra = FILE["engines"]["internevo"]["extra_state_bytes"]

    assert held[0] / held[1] == pytest.approx((12 + extra) / 12)
