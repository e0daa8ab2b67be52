"""The verdict's sentence, rows, figures, prices and checkpoints, from estimates of every kind."""

import pytest

from planner import api
from planner.api import plan
from planner.catalog.devices import get_device
from planner.specs.estimate import PlanRequest, Rejection
from runners.plans.document import PLANS, PlanDocument
from tests.webapp.conftest import client_of
from webapp.core import display
from webapp.core.display import NBSP
from webapp.plans.alternatives import _short, comparison
from webapp.plans.models import Plan
from webapp.plans.targets import targets_of
from webapp.plans.verdict import (
    GOAL_FIGURES,
    MAX_ROWS,
    closest_miss,
    estimate_figures,
    figure_values,
    memory_rows,
    memory_words,
    price_of,
    problem_verdict,
    stored_state,
    verdict_of,
)
from webapp.wizard.drafts import serve_document, stored_draft

# The verdict's sentence, its rows and figures, from estimates of every kind


GIB = 1024**3
CARD = {"device": "rtx-4090"}
NODE = {"device": "h100-sxm5-80gb", "devices_per_node": 8}
SERVE = {"kind": "serve", "input_tokens": 1024, "output_tokens": 256, "concurrency": 16}


def answer_of(model="meta-llama/Llama-3.1-8B", cluster=CARD, workload=SERVE, **more):
    request = {"model": model, "cluster": cluster, "workload": workload, **more}
    return api.plan(PlanRequest.model_validate(request))


def document_of(goal="serve", target="chat", percentile="mean", **workload) -> PlanDocument:
    return PLANS[goal](goal=goal, latency_target=target, percentile=percentile, workload=workload)


def best_with(spare_share: float, reach: float = 0.01, **performance):
    """Return an answer whose best plan has so much of its memory to spare."""
    answer = answer_of()
    best = answer.plans[0]
    capacity = best.memory.capacity_bytes
    peak = int(capacity * (1 - spare_share))
    memory = best.memory.model_copy(update={"per_device_peak_bytes": peak})
    speeds = best.performance.model_copy(update=performance)
    spread = {"per_device_peak_bytes": (peak * (1 - reach), peak * (1 + reach))}
    changed = {"memory": memory, "performance": speeds, "interval": spread}
    best = best.model_copy(update=changed)
    return answer.model_copy(update={"plans": (best,)})


def test_how_much_is_to_spare_decides_between_fits_and_tight():
    for spare, state, tone in [
        (0.5, "fits", "good"),
        (0.051, "fits", "good"),
        (0.049, "tight", "warn"),
        (0.0, "tight", "warn"),
        (-0.01, "tight", "warn"),
    ]:
        verdict = verdict_of(best_with(spare, ttft_seconds=0.1, tpot_seconds=0.01), document_of())
        assert (verdict.state, verdict.tone) == (state, tone), spare

    verdict = verdict_of(best_with(-0.01, ttft_seconds=0.1, tpot_seconds=0.01), document_of())
    assert verdict.sentence.startswith(f"Fits, but only 0{NBSP}B to spare, and about ")


def test_a_missed_target_is_said_before_the_memory():
    for slo, ttft, tpot, state in [
        ("chat", 0.99, 0.049, "fits"),
        ("chat", 1.01, 0.049, "slow"),
        ("chat", 0.99, 0.051, "slow"),
        ("code", 0.6, 0.02, "slow"),
        ("code", 0.4, 0.04, "slow"),
        ("code", 0.4, 0.02, "fits"),
        ("none", 60.0, 1.0, "fits"),
        ("chat", None, None, "fits"),
    ]:
        verdict = verdict_of(
            best_with(0.5, ttft_seconds=ttft, tpot_seconds=tpot), document_of(target=slo)
        )
        assert verdict.state == state, (slo, ttft, tpot)


def test_a_missed_target_says_both_numbers_of_the_one_missed_by_more():
    for ttft, tpot, words in [
        (2.0, 0.01, f"the first token takes 2.0{NBSP}s on average; the target is 1.0{NBSP}s"),
        (0.1, 0.1, f"each further token takes 100{NBSP}ms on average; the target is 50{NBSP}ms"),
        (90.0, 0.1, f"the first token takes 1.5{NBSP}min on average; the target is 1.0{NBSP}s"),
    ]:
        verdict = verdict_of(best_with(0.5, ttft_seconds=ttft, tpot_seconds=tpot), document_of())
        assert verdict.sentence == f"Fits, but {words}", (ttft, tpot)

    answer = best_with(0.5, ttft_seconds=1.1, tpot_seconds=29.0)
    assert "each further token takes" in verdict_of(answer, document_of()).sentence


def test_only_serving_has_a_target_for_speed():
    for goal in ["generate", "finetune", "pretrain", "compress"]:
        verdict = verdict_of(
            best_with(0.5, ttft_seconds=99.0, tpot_seconds=9.0), document_of(goal)
        )
        assert verdict.state == "fits", goal


# The worst first


SLOW = {"ttft_seconds": 2.0, "tpot_seconds": 0.01}


def test_a_target_is_judged_at_the_percentile_that_was_asked_for():
    for percentile, word, state in [
        ("mean", "average", "fits"),
        ("p50", "median", "fits"),
        ("p95", "p95", "slow"),
        ("p99", "p99", "slow"),
    ]:
        figures = {"ttft_seconds": 0.333, "ttft_p50_seconds": 0.25, "ttft_p95_seconds": 1.3,
                   "ttft_p99_seconds": 1.4, "tpot_p50_seconds": 0.01, "tpot_p95_seconds": 0.01,
                   "tpot_p99_seconds": 0.01, "tpot_seconds": 0.01}  # fmt: skip
        answer, draft = best_with(0.5, **figures), document_of(percentile=percentile)

        verdict = verdict_of(answer, draft)

        assert verdict.state == state, percentile
        assert [target.percentile for target in verdict.targets] == [percentile] * 2, percentile
        if state == "slow":
            at = f"the first token takes 1.{3 + (word == 'p99')}{NBSP}s at {word}"
            assert at in verdict.sentence, percentile
        else:
            assert verdict.sentence.endswith("meets both targets"), percentile


def test_a_figure_whose_interval_passes_its_target_says_how_many_runs_would_miss():
    answer = best_with(0.5, ttft_seconds=0.9, ttft_p95_seconds=0.9, tpot_p95_seconds=0.01,
                       tpot_seconds=0.01)  # fmt: skip
    best = answer.plans[0].model_copy(
        update={"interval": {"ttft_seconds": (0.7, 1.3), "tpot_seconds": (0.009, 0.011)}}
    )
    first, further = targets_of(best, document_of(percentile="p95"))

    assert (first.word, further.word) == ("met", "met")
    assert first.odds == "about 1 run in 3 would miss it"
    assert further.odds == ""
    state = verdict_of(answer.model_copy(update={"plans": (best,)}), document_of(percentile="p95"))
    assert (state.tone, state.state) == ("warn", "narrow")


def test_a_peak_whose_interval_passes_the_capacity_is_not_plainly_green():
    """22.7 of 24.0 GiB: 5.4 % to spare, and a likely run that needs more."""
    for reach, state in [(0.02, "fits"), (0.06, "tight"), (0.2, "tight")]:
        answer = best_with(1 - 22.7 / 24.0, reach, ttft_seconds=0.1, tpot_seconds=0.01)
        verdict = verdict_of(answer, document_of())
        assert verdict.state == state, reach
        assert verdict.memory_range.startswith("22.7 of 24.0 GiB, likely "), reach
        assert ("would need more memory than there is" in verdict.sentence) is (
            state == "tight"
        ), reach


def test_a_run_of_months_is_amber_and_one_of_years_is_red():
    for days, state, tone in [
        (1, "fits", "good"),
        (29, "fits", "good"),
        (90, "long", "warn"),
        (618, "too-long", "bad"),
    ]:
        answer = answer_of("HuggingFaceTB/SmolLM2-135M", workload=WORK["pretrain"])
        best = answer.plans[0]
        slow = best.performance.model_copy(update={"duration_seconds": days * 86400.0})
        answer = answer.model_copy(
            update={"plans": (best.model_copy(update={"performance": slow}),)}
        )

        verdict = verdict_of(answer, document_of("pretrain"))

        assert (verdict.state, verdict.tone) == (state, tone), days
        assert (f"{days}{NBSP}days" in verdict.sentence) is (days > 30), days


def test_a_request_longer_than_the_models_context_is_amber_before_its_speed():
    long = {**SERVE, "input_tokens": 8000}
    answer = answer_of("meta-llama/Llama-2-7b-hf", NODE, long, engine="llama_cpp")
    late = answer.plans[0].model_copy(
        update={"performance": answer.plans[0].performance.model_copy(update=SLOW)}
    )
    answer = answer.model_copy(update={"plans": (late,)})

    verdict = verdict_of(answer, document_of())

    assert (verdict.tone, verdict.state) == ("warn", "over-context")
    assert "8256 tokens exceed the model's context of 4096" in verdict.sentence
    assert "The first token takes 2.0" in verdict.detail
    assert not [one for one in verdict.warnings if "exceed the model's context" in one]


def test_the_list_says_what_the_plans_own_page_says():
    for answer, draft in (
        (best_with(0.5, **SLOW), document_of()),
        (best_with(0.01, ttft_seconds=0.1, tpot_seconds=0.01), document_of()),
        (answer_of("meta-llama/Llama-3.1-405B"), document_of()),
    ):
        stored = answer.model_dump(mode="json")

        assert stored_state(stored, draft) == verdict_of(answer, draft).state


def test_many_devices_are_said_in_the_sentence():
    answer = answer_of("meta-llama/Llama-3.1-70B", NODE)
    assert verdict_of(answer, document_of(target="none")).sentence.endswith("on each of 8 devices")


def test_what_does_not_fit_says_by_how_much_at_best_without_rows_and_figures():
    answer = answer_of("meta-llama/Llama-3.1-405B")
    miss = closest_miss(answer.rejected)
    verdict = verdict_of(answer, document_of())
    assert verdict.state == "does-not-fit"
    assert verdict.sentence.startswith("Does not fit: ")
    assert f"{(miss.required - miss.limit) / GIB:.0f}" in verdict.sentence

    verdict = verdict_of(answer_of("meta-llama/Llama-3.1-405B"), document_of())
    assert (verdict.rows, verdict.figures, verdict.brief) == ((), (), ())


def rejection(constraint="memory", required=None, limit=None, reason="it is so") -> Rejection:
    fields = {"family": "", "constraint": constraint, "reason": reason, "unit": "B"}
    return Rejection.model_validate({**fields, "required": required, "limit": limit})


def test_the_closest_miss_is_nearest_to_its_limit_and_of_memory_before_speed():
    rejected = {"far": rejection(required=90, limit=10), "near": rejection(required=11, limit=10)}
    assert closest_miss(rejected) is rejected["near"]

    rejected = {
        "wish": rejection("ttft_seconds", required=1.01, limit=1.0),
        "memory": rejection(required=90, limit=10),
    }
    assert closest_miss(rejected) is rejected["memory"]

    rejected = {"only": rejection("devices")}
    assert closest_miss(rejected) is rejected["only"]
    assert closest_miss({}) is None


def test_a_draft_that_cannot_be_planned_says_why():
    verdict = problem_verdict("This host is gone.")

    assert (verdict.state, verdict.detail, verdict.icon) == (
        "incomplete",
        "This host is gone.",
        "draft",
    )


# Rows and figures


def test_there_is_one_bar_a_device_while_they_are_few_or_a_stage():
    for model, cluster, labels in [
        ("meta-llama/Llama-3.1-8B", CARD, ["Memory"]),
        ("meta-llama/Llama-3.1-70B", NODE, [f"GPU {at}" for at in range(8)]),
        ("meta-llama/Llama-3.1-405B", NODE | {"nodes": 2}, ["Each"]),
    ]:
        best = answer_of(model, cluster, pins={"pipeline_parallel_size": 1}).plans[0]
        assert [row.label for row in memory_rows(best)] == labels, model

    best = answer_of("meta-llama/Llama-3.1-70B", NODE, pins={"pipeline_parallel_size": 4}).plans[0]
    assert [row.label for row in memory_rows(best)] == [f"Stage {at}" for at in range(4)]


def test_a_training_that_generates_has_a_bar_of_its_fuller_phase_and_says_both():
    work = {"kind": "train", "objective": "grpo", "sequence_length": 1024, "global_batch_size": 64}
    asked = {"model": "meta-llama/Llama-3.1-8B", "engine": "nemo_rl", "top": 1}
    for generator, words in [
        ("colocated", "Each device generates and trains in turn: "),
        ("separate", "Devices that generate ("),
    ]:
        best = answered({**work, "generator": generator}, **asked).plans[0]
        (row,) = memory_rows(best)
        assert row.label in {"Training", "Generation"}
        assert row.total_bytes == best.memory.per_device_peak_bytes
        said = memory_words(best)
        assert said.startswith(words)
        assert said.count("GiB") == 2
        assert str(display.memory(best.memory.per_device_peak_bytes)) in said


def test_the_bars_say_the_peak_of_the_estimate():
    for cluster in [CARD, NODE]:
        best = answer_of(cluster=cluster).plans[0]
        totals = [row.total_bytes for row in memory_rows(best)]
        assert max(totals) == pytest.approx(best.memory.per_device_peak_bytes, rel=0.01), cluster


TRAIN = {"kind": "train", "sequence_length": 512, "global_batch_size": 4}
WORK = {
    "serve": SERVE,
    "generate": {"kind": "generate", "batch_size": 8, "input_tokens": 64, "output_tokens": 64},
    "finetune": TRAIN | {"method": "lora", "lora_rank": 16, "tokens": 10**6},
    "pretrain": TRAIN | {"method": "pretrain"},
    "compress": {"kind": "compress", "method": "int4_weight_only", "bits": 4, "group_size": 64},
}


@pytest.mark.parametrize("goal", WORK)
def test_every_figure_of_a_goal_has_a_source_an_equation_and_an_interval(goal):
    draft, answer = document_of(goal), answer_of("HuggingFaceTB/SmolLM2-135M", workload=WORK[goal])

    figures = estimate_figures(answer.plans[0], draft, "/plans/1/why/")
    verdict = verdict_of(answer, draft)

    assert figures[0].label == GOAL_FIGURES[goal][0][1]
    assert {figure.href for figure in figures} == {"/plans/1/why/"}
    for figure in figures:
        assert figure.provenance in {"modelled", "published", "measured"}, figure
        assert figure.note, figure
        if figure.low is not None and figure.high is not None:
            assert figure.low <= figure.value <= figure.high, figure
    first = verdict.figures[0]  # a line on a phone has room for one figure and its name
    assert verdict.brief == (f"{first.label} {first.shown}",)


def test_a_figure_of_time_or_speed_has_its_value_and_one_that_does_not_apply_is_left_out():
    answer = answer_of("HuggingFaceTB/SmolLM2-135M", workload=WORK["pretrain"])
    labels = [each.label for each in estimate_figures(answer.plans[0], document_of("pretrain"))]
    assert "Speed" in labels
    assert "In 2 min" not in labels  # it would leave out evaluations and saving

    best = answer_of().plans[0]
    value, low, high = figure_values(best, "tokens_per_second_per_person")
    assert value == pytest.approx(1 / best.performance.tpot_seconds)
    assert low < value < high

    for name in ["written_weights_bytes", "step_seconds", "nonsense"]:
        assert figure_values(answer_of().plans[0], name) is None, name
    assert set(GOAL_FIGURES) == set(PLANS)


# Prices: of all devices together, by the hour, for the run and for a million tokens


LLAMA_70B = "meta-llama/Llama-3.1-70B"


def test_a_price_is_of_all_devices_and_says_so_and_its_providers_stand_apart():
    price = price_of(answer_of(LLAMA_70B, NODE, engine="vllm").plans[0])
    hourly = get_device("h100-sxm5-80gb").price_usd_per_hour
    assert price.total == f"${8 * hourly:.2f}/h for all 8 GPUs"
    assert price.each == f"${hourly:.2f}/h for each"
    assert price.more[0].endswith(f"{NBSP}/ 1M tokens")

    price = price_of(answer_of(LLAMA_70B, NODE, engine="vllm").plans[0])
    assert "offers" not in str(price)
    assert price.sources.startswith("median of 21 on-demand offers of ")


def test_a_training_says_the_money_of_its_run_and_its_utilisation():
    work = {**WORK["pretrain"], "tokens": 10**9}
    answer = answer_of("HuggingFaceTB/SmolLM2-135M", CARD, work)
    best = answer.plans[0]

    price = price_of(best)
    shown = {one.label: one.value for one in estimate_figures(best, document_of("pretrain"))}

    assert price.more[0].endswith(" for the run")
    assert shown["Cost of the run"] == pytest.approx(best.run_cost_usd)
    assert shown["Model FLOP utilisation"] == pytest.approx(best.performance.mfu)


def test_hardware_without_a_price_has_none():
    for cluster in [{"device": "rtx-3070-ti"}, {"device": "cpu-ryzen-7950x"}]:
        answer = answer_of("HuggingFaceTB/SmolLM2-135M", cluster, SERVE)
        assert price_of(answer.plans[0]) is None, cluster
        assert price_of(None) is None, cluster


# Plans on many devices stay readable: stages, axes, the evidence behind each figure


LLAMA_405B = "meta-llama/Llama-3.1-405B"
PRETRAIN = {
    "kind": "train",
    "sequence_length": 8192,
    "global_batch_size": 1024,
    "method": "pretrain",
}
MANY = {"kind": "serve", "input_tokens": 1024, "output_tokens": 256, "concurrency": 64}
WIDE = {"tensor_parallel_size": 8, "pipeline_parallel_size": 1}


def answered(workload, **fields):
    base = {"model": "meta-llama/Llama-3.1-70B", "cluster": NODE, "workload": workload}
    return plan(PlanRequest.model_validate({**base, **fields}))


def trained(stages):
    pins = {"pipeline_parallel_size": stages, "tensor_parallel_size": 8}
    cluster = {**NODE, "nodes": 128}
    return answered(PRETRAIN, model=LLAMA_405B, cluster=cluster, pins=pins, top=1).plans[0]


def test_sixteen_stages_are_drawn_the_fullest_is_named_and_further_ones_are_said():
    best = trained(16)
    assert [row.label for row in memory_rows(best)] == [f"Stage {at}" for at in range(16)]
    peaks = best.memory.per_stage_peak_bytes
    assert f"Stage {peaks.index(max(peaks))} is the fullest." in memory_words(best)
    assert memory_words(best).startswith("64 devices a stage.")

    best = trained(32)
    assert len(memory_rows(best)) == MAX_ROWS
    assert "16 further stages take at most " in memory_words(best)


def test_many_devices_alike_are_one_bar_and_a_few_a_bar_each():
    best = answered(MANY, cluster={**NODE, "nodes": 2}, pins=WIDE).plans[0]
    assert [row.label for row in memory_rows(best)] == ["Each"]
    assert memory_words(best) == "The same on each of 16 devices."

    best = answered(MANY, pins=WIDE).plans[0]
    assert len(memory_rows(best)) == 8
    assert memory_words(best) == ""


def test_the_terms_beside_the_bars_are_of_the_fullest_and_a_label_is_short():
    answer = answered(PRETRAIN, model=LLAMA_405B, cluster={**NODE, "nodes": 128})
    found = verdict_of(answer, document_of("pretrain"))
    assert found.fullest.total_bytes == max(row.total_bytes for row in found.rows)

    for value, label in [
        (0, "0"),
        (40, "40"),
        (2500, "2\u202f500"),
        (200_000, "200k"),
        (1_500_000, "1.50M"),
    ]:
        assert _short(value) == label, value


@pytest.mark.django_db
def test_a_figure_links_to_its_equation_and_to_how_far_such_figures_are_off(team, alice):
    kept = Plan.objects.create(team=team, owner=alice, draft=stored_draft(serve_document(None)))
    page = client_of(alice).get(f"/plans/{kept.pk}/").content.decode()
    assert f'class="prov modelled" href="/plans/{kept.pk}/why/"' in page
    assert '<a href="/docs/accuracy">' in page


# What a plan needs besides the stored checkpoint, in the verdict and beside each plan


TWO_H100 = {"device": "h100-sxm5-80gb", "devices_per_node": 2}


def starts(**more) -> str:
    return verdict_of(answer_of(**more), document_of()).start


@pytest.fixture(scope="module")
def dense():
    """A checkpoint in 16 bits on devices with FP8 arithmetic."""
    return answer_of("Qwen/Qwen3-32B", TWO_H100, engine="vllm")


def test_the_stored_checkpoint_is_started_and_each_plan_says_which_one_it_needs(dense):
    words = verdict_of(dense, document_of()).start
    assert words.startswith("Planned for vLLM, which starts the checkpoint as it is stored. FP8 w")
    assert words.endswith("% faster: quantised to FP8 while loading.")

    rows = comparison(dense, document_of())
    assert rows[0].why == "Best of those that start the checkpoint as it is stored"
    needs = {row.words.split()[0]: row.why.rpartition("; ")[2] for row in rows[1:]}
    assert needs["FP8"] == "quantised to FP8 while loading"
    assert needs["INT8"] == "needs a checkpoint in INT8 (W8A8)"


def test_a_quantised_checkpoint_starts_as_stored_or_the_verdict_says_what_it_needs():
    for pinned, words in [
        ({"weight_dtype": "fp8"}, "Planned for vLLM: quantised to FP8 while loading."),
        ({"weight_dtype": "int4"}, "Planned for vLLM: needs a checkpoint in INT4 (AWQ)."),
        (
            {"weight_dtype": "bf16"},
            "Planned for vLLM, which starts the checkpoint as it is stored.",
        ),
    ]:
        assert starts(engine="vllm", pins=pinned) == words, pinned

    model, card = "openai/gpt-oss-20b", {"device": "h100-sxm5-80gb"}
    words = starts(model=model, cluster=card, engine="vllm")
    assert words == "Planned for vLLM, which starts the checkpoint as it is stored."
    words = starts(
        cluster={"device": "apple-m3-max"}, engine="llama_cpp", pins={"weight_dtype": "int8"}
    )
    assert words == "Planned for llama.cpp: needs a GGUF file of type Q8_0."


def test_without_a_request_or_where_any_checkpoint_is_converted_nothing_is_said(dense):
    answer = answer_of()
    assert verdict_of(answer, document_of()).start == ""
    assert "checkpoint" not in " ".join(row.why for row in comparison(answer, document_of()))
    stored = dense.model_copy(update={"request": None})
    assert verdict_of(stored, document_of()).start == ""


def test_a_long_training_shows_its_wall_time_goodput_and_checkpoint_interval():
    work = {"kind": "train", "method": "pretrain", "sequence_length": 4096}
    asked = {"cluster": NODE | {"nodes": 8}, "pins": {"tensor_parallel_size": 1}, "top": 1}
    for tokens, shown in ((10**12, True), (10**8, False)):
        workload = work | {"global_batch_size": 512, "tokens": tokens}
        best = answer_of(workload=workload, **asked).plans[0]
        figures = {each.label: each for each in estimate_figures(best, document_of("pretrain"))}
        assert ("With its failures" in figures) == shown, tokens
        if shown:
            found = best.reliability
            wall, goodput = figures["With its failures"], figures["Goodput"]
            assert (wall.low, wall.high) == found.wall_interval
            assert wall.value > figures["The whole run"].value
            assert goodput.value == found.goodput_ratio < 1
            assert figures["Checkpoint every"].value == found.checkpoint_interval_seconds
