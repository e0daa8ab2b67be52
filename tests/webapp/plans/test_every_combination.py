"""Every goal with every source of a model on every hardware: a page that answers."""

import html
import re

import pytest

from planner.specs.estimate import PlanAnswer
from tests.plugins.extent import combinations
from tests.webapp.answers import fresh
from tests.webapp.conftest import client_of
from webapp.modelhub.shapes import demo_config
from webapp.plans.errors import DraftProblem
from webapp.plans.models import Plan
from webapp.plans.planning import plan_compute
from webapp.wizard.drafts import GOALS, serve_draft

pytestmark = pytest.mark.django_db(databases="__all__")
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


def unread(words: str) -> list[str]:
    """What stands in a text that a program left there: long tails, exponents, leftovers."""
    return LONG_TAIL.findall(words) + LEFTOVER.findall(words)


def rows_of(goal: str, rows: list[tuple]) -> list[tuple]:
    return [row[1:] for row in rows if row[0] == goal]


PLANS = combinations(GOALS, MODELS, HARDWARE)
SHOWN = combinations(GOALS, TABS, HARDWARE)


@pytest.mark.parametrize("goal", GOALS)
def test_every_plan_is_said_in_numbers_with_a_source_and_every_refusal_with_a_reason(
    alice, make, goal
):
    client, wrong = client_of(alice), []
    for model, hardware in rows_of(goal, PLANS):
        plan = make(goal, model, hardware)
        silent, refused = [], ""
        try:
            answer = plan_compute(plan)
        except DraftProblem as problem:  # vLLM starts no model with more than it reads at once
            refused = str(problem)
        else:
            plan.refresh_from_db()
            if PlanAnswer.model_validate(plan.answer) != answer:
                wrong.append((model, hardware, "reads back as another answer"))
            silent = [name for name, one in answer.rejected.items() if not one.reason.strip()]
        if refused and (hardware == "host" or "exceed the context of 256" not in refused):
            wrong.append((model, hardware, refused))

        response = client.get(f"/plans/{plan.pk}/")
        assert response.status_code == 200, (model, hardware)
        page = response.content.decode()
        words = words_of(page)
        left = unread(words) + EXPONENT.findall(words)
        sources = len(re.findall(r'class="prov (?:modelled|published|measured)"', page))
        unsaid = page.count('<div class="figure">') - sources

        review = words_of(client.get(f"/plans/{plan.pk}/edit/review/").content.decode())
        left += unread(review)
        if model == "small" and "SmolLM2 135M" not in review:
            wrong.append((model, hardware, "a review that does not name its model"))
        if silent or left or unsaid > 0:
            wrong.append((model, hardware, silent, left, unsaid))
    assert not wrong, wrong


@pytest.mark.parametrize("goal", GOALS)
def test_every_tab_reads_well_for_every_goal(alice, make, goal):
    client, wrong = client_of(alice), []
    for tab, hardware in rows_of(goal, SHOWN):
        plan = make(goal, "demo" if hardware == "host" else "8B", hardware)
        response = client.get(f"/plans/{plan.pk}/{tab}")
        assert response.status_code == 200, (tab, hardware)
        left = unread(words_of(response.content.decode())) if tab != "exports/" else []
        if left:
            wrong.append((tab, hardware, left))
    assert not wrong, wrong


def test_planning_the_same_question_twice_gives_the_same_strategies(make):
    for goal in GOALS:
        plan = make(goal, "8B", "node")
        with fresh():
            first, second = plan_compute(plan), plan_compute(plan)
        strategies = [one.strategy for one in first.plans]
        assert strategies == [one.strategy for one in second.plans], goal
