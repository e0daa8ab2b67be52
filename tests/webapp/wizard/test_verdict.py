"""The rail: what it says after a change, and the chips that change the draft."""

import pytest

from planner import api
from planner.errors import PlannerError
from tests.webapp.conftest import client_of
from webapp.plans.planning import current_answer

pytestmark = pytest.mark.django_db


def verdict_url(walker, step: str = "") -> str:
    return f"/plans/{walker.plan_id}/verdict/?step={step}"


def test_a_change_is_saved_and_the_rail_comes_back_alone(walk):
    walker = walk()
    data = {**walker.shown("workload"), "global_batch_size": 2}

    response = walker.client.post(verdict_url(walker, "workload"), data)

    assert response.content.decode().lstrip().startswith('<div id="verdict"')
    assert walker.plan.draft["workload"]["pretrain"]["global_batch_size"] == 2


def test_a_wrong_change_says_so_and_is_not_saved(walk):
    walker = walk()
    data = {**walker.shown("workload"), "global_batch_size": "x"}

    html = walker.client.post(verdict_url(walker, "workload"), data).content.decode()

    assert "Not saved: correct the form first" in html
    assert "from 1 to 100,000" in html
    assert walker.plan.draft["workload"]["pretrain"]["global_batch_size"] == 2


def test_the_rail_can_be_read_by_a_viewer(walk, vera):
    walker = walk()

    assert client_of(vera).get(verdict_url(walker)).status_code == 200


def test_another_team_finds_no_rail(walk, charlie):
    walker = walk()

    assert client_of(charlie).get(verdict_url(walker)).status_code == 404


def test_every_figure_of_the_rail_has_a_provenance(walk):
    html = walk().page("review").content.decode()

    assert html.count('class="figure"') == html.count('class="prov modelled"')
    assert html.count('class="figure"') >= 3


def test_the_rail_says_how_many_strategies_in_which_time(walk):
    assert "strategies compared in" in walk().page("goal").content.decode()


def test_the_phone_gets_the_verdict_in_one_line(walk):
    assert 'class="verdict-line"' in walk().page("goal").content.decode()


@pytest.fixture
def too_large(walk):
    """A draft that does not fit: 70B on one 24 GiB card."""
    walker = walk("?preset=serve")
    walker.press("model", catalog_id="meta-llama/Llama-3.1-70B")
    walker.press("hardware", choice="catalog", device="rtx-4090", devices_per_node=1)
    return walker


def test_what_does_not_fit_says_by_how_much(too_large):
    verdict = too_large.page("review").context["verdict"]

    assert verdict.state == "does-not-fit"
    assert "GiB over at best" in verdict.sentence


def test_every_suggestion_when_pressed_really_fits(too_large):
    offers = too_large.page("review", "?offers=1").context["offers"]
    numbers = [(chip.at, group.heading) for group in offers for chip in group.chips]
    assert len(numbers) >= 3

    for index, heading in numbers:
        plan = too_large.plan
        before = (plan.draft, plan.answer, plan.is_brief)
        data = {"suggestion": index, "step": "review"}
        too_large.client.post(f"/plans/{plan.pk}/suggestion/", data)
        met = {"fits", "tight"} if "target" in heading else {"fits", "tight", "slow"}
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


def test_a_plan_that_meets_everything_asks_for_no_offers(walk):
    walker = walk()
    html = walker.page("review").content.decode()

    assert walker.plan.is_brief
    assert "/offers/" not in html


def test_a_missed_target_has_offers_to_come_as_a_misfit_has(walk):
    assert "/offers/" in walk("?preset=serve").page("review").content.decode()


def test_another_team_finds_no_offers(walk, charlie):
    assert client_of(charlie).get(f"/plans/{walk().plan_id}/offers/").status_code == 404


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


def test_a_suggestion_of_an_older_verdict_is_refused(too_large):
    url = f"/plans/{too_large.plan_id}/suggestion/"

    page = too_large.client.post(url, {"suggestion": "99", "step": "goal"}, follow=True)

    assert "older verdict" in page.content.decode()


def test_a_missed_wish_for_speed_does_not_hide_what_runs(walk):
    verdict = walk("?preset=serve").page("review").context["verdict"]

    assert verdict.tone == "warn"
    assert "the target is 1.0" in verdict.sentence
    assert verdict.figures


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("b200-sxm", "NVFP4 weights"),
        ("t4", "NVFP4 weights need compute capability 8.0"),
    ],
)
def test_nvfp4_can_be_pinned_and_is_refused_where_the_engine_does(walk, device, words):
    walker = walk()
    walker.press("goal", goal="serve")
    walker.press("model", source="catalog", catalog_id="Qwen/Qwen3-32B")
    changes = {"choice": "catalog", "device": device, "devices_per_node": 1}
    walker.press("hardware", **changes, **{"pin-weight_dtype": "nvfp4"})

    verdict = walker.page("review").context["verdict"]
    assert words in verdict.detail
    assert (verdict.state == "refused") is (device == "t4")
