"""Every goal with every source of a model on every hardware: a page that answers."""

import html
import itertools
import re

import pytest

from planner.specs.estimate import PlanAnswer
from tests.plugins.extent import combinations
from tests.webapp.answers import fresh
from tests.webapp.conftest import client_of
from webapp.modelhub.shapes import demo_config
from webapp.plans.models import Plan
from webapp.plans.planning import plan_compute
from webapp.wizard.drafts import GOALS, serve_draft

pytestmark = pytest.mark.django_db
MODELS = {
    "demo": {"source": "demo"},
    "small": {"source": "catalog", "catalog_id": "HuggingFaceTB/SmolLM2-135M"},
    "8B": {"source": "catalog", "catalog_id": "meta-llama/Llama-3.1-8B"},
    "405B": {"source": "catalog", "catalog_id": "meta-llama/Llama-3.1-405B"},
    "experts": {"source": "catalog", "catalog_id": "mistralai/Mixtral-8x7B-v0.1"},
    "config": {"source": "config", "config": demo_config()},
    "folder": {"source": "folder", "path": "tiny", "folder_config": demo_config()},
    "team": {"source": "team"},
}
HARDWARE = {
    "host": {},
    "card": {"choice": "catalog", "device": "rtx-4090"},
    "node": {"choice": "catalog", "device": "h100-sxm5-80gb", "devices_per_node": 8, "nodes": 2},
}
GOALS_AND_HARDWARE = list(itertools.product(GOALS, HARDWARE))
TABS = ["alternatives/", "why/", "exports/", "history/"]
TAG = re.compile(r"<[^>]+>")
PAPER = re.compile(r"\b\d{4}[.]\d{5}\b")  # arXiv's numbers are no figures
LONG_TAIL = re.compile(r"\b[1-9]\d*[.]\d{4,}|\b0[.]0*[1-9]\d{4,}")
EXPONENT = re.compile(r"\b\d(?:[.]\d+)?e[+-]?\d\d\b")
LEFTOVER = re.compile(r"\b(?:None|nan|inf|NaN|(?<!ZeRO-)Infinity|Quantity|dict|\{\{)\b|\[&#x27;")


@pytest.fixture
def make(team, alice, host, trained):
    """Return a plan of a goal, a model and hardware."""

    def plan(goal: str, model: str, hardware: str) -> Plan:
        draft = serve_draft(host)
        draft["goal"]["goal"] = goal
        draft["model"] |= MODELS[model] | ({"team_model": trained.pk} if model == "team" else {})
        draft["hardware"] |= HARDWARE[hardware]
        name = f"{goal} {model} {hardware}"
        return Plan.objects.create(team=team, owner=alice, name=name, draft=draft)

    return plan


def words_of(page: str) -> str:
    """Return what a person reads of a page."""
    body = page.split("<main", 1)[1].split("</main>", 1)[0]
    return PAPER.sub("", html.unescape(TAG.sub(" ", body)))


@pytest.mark.parametrize(("goal", "model", "hardware"), combinations(GOALS, MODELS, HARDWARE))
def test_every_summary_answers_in_numbers_that_people_read(alice, make, goal, model, hardware):
    plan = make(goal, model, hardware)

    response = client_of(alice).get(f"/plans/{plan.pk}/")
    words = words_of(response.content.decode())

    assert response.status_code == 200
    assert not LONG_TAIL.findall(words)
    assert not EXPONENT.findall(words)
    assert not LEFTOVER.findall(words)


@pytest.mark.parametrize(("goal", "hardware"), GOALS_AND_HARDWARE)
def test_every_figure_of_a_summary_says_where_it_comes_from(alice, make, goal, hardware):
    plan = make(goal, "small", hardware)

    page = client_of(alice).get(f"/plans/{plan.pk}/").content.decode()

    figures = page.count('<div class="figure">')
    assert len(re.findall(r'class="prov (?:modelled|published|measured)"', page)) >= figures


@pytest.mark.parametrize(("goal", "tab", "hardware"), combinations(GOALS, TABS, HARDWARE))
def test_every_tab_reads_well_for_every_goal(alice, make, goal, hardware, tab):
    plan = make(goal, "demo" if hardware == "host" else "8B", hardware)

    response = client_of(alice).get(f"/plans/{plan.pk}/{tab}")
    words = words_of(response.content.decode())

    assert response.status_code == 200
    assert tab == "exports/" or not LONG_TAIL.findall(words)
    assert tab == "exports/" or not LEFTOVER.findall(words)


@pytest.mark.parametrize(("goal", "hardware"), GOALS_AND_HARDWARE)
def test_the_review_names_goal_model_and_hardware(alice, make, goal, hardware):
    plan = make(goal, "small", hardware)

    page = client_of(alice).get(f"/plans/{plan.pk}/edit/review/").content.decode()
    words = words_of(page)

    assert "SmolLM2 135M" in words
    assert not LONG_TAIL.findall(words)
    assert not LEFTOVER.findall(words)


@pytest.mark.parametrize(("goal", "hardware"), GOALS_AND_HARDWARE)
def test_a_stored_answer_reads_back_as_it_was(make, goal, hardware):
    plan = make(goal, "experts", hardware)
    answer = plan_compute(plan)

    plan.refresh_from_db()

    assert PlanAnswer.model_validate(plan.answer) == answer


@pytest.mark.parametrize("goal", GOALS)
def test_planning_the_same_question_twice_gives_the_same_strategies(make, goal):
    plan = make(goal, "8B", "node")

    with fresh():
        first, second = plan_compute(plan), plan_compute(plan)

    assert [one.strategy for one in first.plans] == [one.strategy for one in second.plans]


@pytest.mark.parametrize(("goal", "model"), list(itertools.product(GOALS, MODELS)))
def test_whatever_is_ruled_out_has_its_reason(make, goal, model):
    answer = plan_compute(make(goal, model, "host"))

    assert [name for name, one in answer.rejected.items() if not one.reason.strip()] == []
