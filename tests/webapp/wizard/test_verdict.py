"""The rail and what stands beside a form: what follows a change, what chips do."""

import pytest

from planner import api
from planner.specs.base import PlannerError
from tests.webapp.conftest import client_of
from webapp.hosts.health import processor_words
from webapp.plans.planning import current_answer

pytestmark = pytest.mark.django_db(databases="__all__")


def verdict_url(walker, step: str = "") -> str:
    return f"/plans/{walker.plan_id}/verdict/?step={step}"


def test_a_change_is_saved_with_the_rail_alone_and_a_wrong_one_says_so(walk):
    walker = walk()
    data = {**walker.shown("workload"), "global_batch_size": 2}
    response = walker.client.post(verdict_url(walker, "workload"), data)
    assert response.content.decode().lstrip().startswith('<div id="verdict"')
    assert walker.plan.draft["workload"]["global_batch_size"] == 2

    data = {**walker.shown("workload"), "global_batch_size": "x"}
    html = walker.client.post(verdict_url(walker, "workload"), data).content.decode()
    assert "Not saved: correct the form first" in html
    assert "from 1 to 100,000" in html
    assert walker.plan.draft["workload"]["global_batch_size"] == 2


def test_the_rail_is_read_by_a_viewer_and_not_by_another_team(walk, vera, charlie):
    walker = walk()
    assert client_of(vera).get(verdict_url(walker)).status_code == 200
    assert client_of(charlie).get(verdict_url(walker)).status_code == 404
    assert client_of(charlie).get(f"/plans/{walk().plan_id}/offers/").status_code == 404


def test_the_rail_has_provenance_search_time_and_one_line_for_the_phone(walk):
    html = walk().page("review").content.decode()
    assert html.count('class="figure"') == html.count('class="prov modelled"')
    assert html.count('class="figure"') >= 3

    assert "strategies compared in" in walk().page("goal").content.decode()
    assert 'class="verdict-line"' in walk().page("goal").content.decode()


@pytest.fixture
def too_large(walk):
    """A draft that fits with no engine: 70B in FP8 on one 24 GiB card."""
    walker = walk("?preset=serve")
    walker.press("model", catalog_id="meta-llama/Llama-3.1-70B")
    card = {"choice": "catalog", "device": "rtx-4090", "devices_per_node": 1}
    walker.press("hardware", **card, **{"pin-weight_dtype": "fp8"})
    return walker


def test_what_does_not_fit_says_by_how_much(too_large):
    verdict = too_large.page("review").context["verdict"]
    assert verdict.state == "does-not-fit"
    assert "GiB over at best" in verdict.sentence
    assert verdict.start == "Engines compared: vLLM, SGLang and llama.cpp."


def test_every_suggestion_when_pressed_really_fits(too_large):
    offers = too_large.page("review", "?offers=1").context["offers"]
    numbers = [(chip.at, group.heading) for group in offers for chip in group.chips]
    assert len(numbers) >= 3

    for index, heading in numbers:
        plan = too_large.plan
        before = (plan.draft, plan.answer, plan.is_brief)
        data = {"suggestion": index, "step": "review"}
        too_large.client.post(f"/plans/{plan.pk}/suggestion/", data)
        met = {"fits", "tight", "narrow" if "target" in heading else "slow"}
        assert too_large.page("review").context["verdict"].state in met
        plan.draft, plan.answer, plan.is_brief = before
        plan.save()


def test_a_verdict_comes_first_and_its_offers_when_they_are_asked_for(too_large):
    first = too_large.page("review").content.decode()
    url = f"/plans/{too_large.plan_id}/offers/?step=review"
    assert too_large.plan.is_brief
    assert f'hx-get="{url}"' in first
    assert 'name="suggestion"' not in first

    offers = too_large.client.get(url).content.decode()
    later = too_large.page("review").content.decode()

    assert not too_large.plan.is_brief
    assert offers.count('name="suggestion"') >= 3
    assert later.count('name="suggestion"') == offers.count('name="suggestion"')
    assert f'name="revision" value="{too_large.plan.revision}"' in offers
    assert url not in later


def test_only_what_misses_something_has_offers_to_come_and_says_so_beside_what_runs(walk):
    walker = walk()
    html = walker.page("review").content.decode()
    assert walker.plan.is_brief
    assert "/offers/" not in html
    assert "/offers/" in walk("?preset=serve").page("review").content.decode()

    verdict = walk("?preset=serve").page("review").context["verdict"]
    assert verdict.tone == "warn"
    assert "the target is 1.0" in verdict.sentence
    assert verdict.figures


def test_a_saved_plan_has_its_whole_answer(walk):
    walker = walk()
    walker.page("review")
    assert walker.plan.is_brief

    walker.client.post(f"/plans/{walker.plan_id}/launch/", {"go": "keep"})

    assert (walker.plan.is_draft, walker.plan.is_brief) == (False, False)
    assert len(walker.plan.answer["pareto"]) > 1


def test_a_plan_whose_whole_answer_is_not_to_be_had_keeps_the_brief_one(walk, monkeypatch):
    walker = walk()
    walker.page("review")

    def refuse(_request):
        raise PlannerError("the catalog lost this device")

    monkeypatch.setattr(api, "plan", refuse)
    walker.client.post(f"/plans/{walker.plan_id}/launch/", {"go": "keep"})

    assert (walker.plan.is_draft, walker.plan.is_brief) == (False, True)
    assert len(walker.plan.answer["plans"]) == 1


def test_a_whole_answer_that_came_too_late_overwrites_no_newer_draft(too_large):
    late = too_large.plan
    too_large.press("hardware", choice="catalog", device="rtx-4090", devices_per_node=8)
    newer = too_large.plan.answer
    current_answer(late)
    assert too_large.plan.answer == newer


def test_nvfp4_can_be_pinned_and_is_refused_where_the_engine_does(walk):
    refusal = "NVFP4 weights need compute capability 8.0"
    for device, engine, words in [
        ("b200-sxm", "", "NVFP4 weights"),
        ("t4", "", "NVFP4 weights"),  # by llama.cpp alone
        ("t4", "vllm", refusal),
    ]:
        walker = walk()
        walker.press("goal", goal="serve")
        walker.press("model", source="catalog", catalog_id="Qwen/Qwen3-32B")
        changes = {"choice": "catalog", "device": device, "devices_per_node": 1, "engine": engine}
        walker.press("hardware", **changes, **{"pin-weight_dtype": "nvfp4"})

        verdict = walker.page("review").context["verdict"]
        assert words in verdict.detail, (device, engine)
        assert (verdict.state == "refused") is bool(engine), (device, engine)
        if (device, engine) == ("t4", ""):
            reasons = walker.client.get(f"/plans/{walker.plan_id}/alternatives/")
            assert refusal in reasons.content.decode()


# What stands beside a form follows it: the model card, the step strip, another model's work


LLAMA_70B, LLAMA_405B = "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-405B"


def saved_live(walker, step, **changes):
    """Return what comes back when a form changes, as htmx sends it."""
    data = {**walker.shown(step), **changes}
    url = f"/plans/{walker.plan_id}/verdict/?step={step}"
    return walker.client.post(url, data, headers={"HX-Request": "true"}).content.decode()


def test_the_model_card_and_the_strip_follow_what_was_typed(walk):
    walker = walk("?preset=serve")
    assert "8.03\N{NO-BREAK SPACE}B parameters" in walker.page("model").content.decode()
    html = saved_live(walker, "model", catalog_id=LLAMA_70B)
    card = html.split('id="shape-words"')[1].split("</span>")[0]
    assert 'hx-swap-oob="true"' in card
    assert "70.6\N{NO-BREAK SPACE}B parameters" in card
    assert "80 layers" in card

    html = saved_live(walk("?preset=serve"), "model", catalog_id="no/such-model")
    card = html.split('id="shape-words"')[1].split("</span>")[0]
    assert "layers" not in card

    html = saved_live(walk("?preset=serve"), "workload", concurrency=77)
    strip = html.split('id="steps"')[1].split("</ol>")[0]
    assert 'hx-swap-oob="true"' in strip
    assert "77 requests" in strip


def test_strip_and_rail_are_announced_and_a_get_returns_the_rail_alone(walk, vera):
    html = walk().page("workload").content.decode()
    assert 'hx-indicator="#verdict, #steps"' in html
    assert 'id="steps"' in html

    walker = walk()
    html = client_of(vera).get(f"/plans/{walker.plan_id}/verdict/").content.decode()
    assert "hx-swap-oob" not in html


def test_the_demos_workload_does_not_leak_into_another_models_pre_training(walk):
    for model, length in [(LLAMA_70B, 4096), (LLAMA_405B, 8192)]:
        walker = walk()
        assert walker.plan.draft["workload"]["sequence_length"] == 256, model

        walker.press("model", source="catalog", catalog_id=model)

        work = walker.plan.draft["workload"]
        assert work["time_budget_seconds"] is None, model
        assert work["sequence_length"] == length, model
        assert work["global_batch_size"] == 16, model
        assert work["tokens"] == pytest.approx(
            20 * float(model[-4:-1].strip("-")) * 1e9, rel=0.02
        ), model

    walker = walk()
    walker.press("goal", goal="serve")
    walker.press("model", source="catalog", catalog_id=LLAMA_70B)
    walker.press("goal", goal="pretrain")
    assert walker.plan.draft["workload"]["sequence_length"] == 4096


def test_the_first_verdict_of_a_newcomer_asks_no_more_than_the_demo_reads(walk):
    walker = walk()
    rail = walker.press("goal", go="stay", goal="serve") and walker.page("goal").content.decode()
    assert walker.plan.draft["model"]["source"] == "demo"
    assert "exceed the model" not in rail


def test_another_model_than_the_demo_is_asked_for_the_usual_lengths(walk):
    for goal in ["serve", "generate"]:
        walker = walk()
        walker.press("goal", goal=goal)
        walker.press("model", source="catalog", catalog_id=LLAMA_70B)
        work = walker.plan.draft["workload"]
        assert (work["input_tokens"], work["output_tokens"]) == (1024, 256), goal


def test_a_workload_or_lengths_that_somebody_chose_stay_with_another_model(walk):
    walker = walk()
    walker.press("workload", global_batch_size=3)
    walker.press("model", source="catalog", catalog_id=LLAMA_70B)
    work = walker.plan.draft["workload"]
    assert (work["global_batch_size"], work["sequence_length"]) == (3, 256)

    walker = walk()
    walker.press("goal", goal="serve")
    walker.press("workload", input_tokens=100, output_tokens=20)
    walker.press("model", source="catalog", catalog_id=LLAMA_70B)
    work = walker.plan.draft["workload"]
    assert (work["input_tokens"], work["output_tokens"]) == (100, 20)


def test_a_batch_that_nobody_chose_grows_with_the_devices_and_a_chosen_one_stays(walk):
    walker = walk()
    walker.press("goal", goal="pretrain")
    walker.press("model", source="catalog", catalog_id=LLAMA_405B)
    for nodes, sequences in [(1, 128), (4, 512), (128, 2048)]:
        walker.press(
            "hardware", choice="catalog", device="h100-sxm5-80gb", devices_per_node=8, nodes=nodes
        )
        assert walker.plan.draft["workload"]["global_batch_size"] == sequences, nodes

    walker.press("workload", global_batch_size=96)
    walker.press(
        "hardware", choice="catalog", device="h100-sxm5-80gb", devices_per_node=8, nodes=2
    )
    assert walker.plan.draft["workload"]["global_batch_size"] == 96


def test_the_demo_keeps_its_two_minutes(walk):
    walker = walk()
    walker.press("model")
    assert walker.plan.draft["workload"]["time_budget_seconds"] > 0


def test_logical_cpus_are_not_called_processors():
    for count, words in [(1, "Xeon, 1 logical CPU"), (2, "Xeon, 2 logical CPUs")]:
        assert processor_words({"cpu_count": count, "cpu_model": "Xeon"}) == words, count


# The first seconds of a fresh installation: the host is there, its speed is not


@pytest.fixture
def review(walk, host):
    """The demo's review page while the host's micro-benchmark still runs."""
    walker = walk("?preset=demo")
    host.microbench = {}
    host.save()
    return walker.page("review").content.decode()


def test_the_review_asks_again_by_itself_in_a_moment_and_launches_nothing(review):
    assert "In a moment" in review
    assert "about 15 seconds" in review
    assert 'data-reload-ms="3000"' in review
    assert 'name="run"' not in review


def test_a_measured_host_is_not_asked_again(walk):
    page = walk("?preset=demo").page("review").content.decode()
    assert "data-reload-ms" not in page
    assert 'name="run" value="job"' in page
