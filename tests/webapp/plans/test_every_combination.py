"""Every goal, model and hardware has a page that answers; so has a draft that lacks something."""

import html
import re
from operator import itemgetter

import pytest

from planner import api
from planner.specs.estimate import PlanAnswer
from runners.plans.document import GOALS, ModelChoice, read_stored, repaired
from runners.plans.refusals import DraftProblem
from tests.plugins.extent import combinations, sample
from tests.webapp.answers import fresh
from tests.webapp.conftest import client_of
from webapp.modelhub.models import demo_config
from webapp.plans.models import Plan
from webapp.plans.planning import current_answer, plan_compute, plan_keep
from webapp.wizard.drafts import SLUGS, new_document, serve_document, stored_draft

pytestmark = pytest.mark.django_db(databases="__all__")
MODELS = {
    "demo": {"source": "demo"},
    "small": {"source": "catalog", "catalog_id": "HuggingFaceTB/SmolLM2-135M"},
    "8B": {"source": "catalog", "catalog_id": "meta-llama/Llama-3.1-8B"},
    "405B": {"source": "catalog", "catalog_id": "meta-llama/Llama-3.1-405B"},
    "experts": {"source": "catalog", "catalog_id": "mistralai/Mixtral-8x7B-v0.1"},
    "config": {"source": "config", "config": demo_config()},
    "folder": {"source": "folder", "path": "tiny", "config": demo_config()},
    "team": {"source": "team"},
}
HARDWARE = {
    "host": {},
    "card": {"host": None, "device": "rtx-4090"},
    "node": {"host": None, "device": "h100-sxm5-80gb", "devices_per_node": 8, "nodes": 2},
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
        draft = stored_draft(new_document(goal, ModelChoice(source="catalog"), host))
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


PLANS = sample(combinations(GOALS, MODELS, HARDWARE), kind=itemgetter(0))
SHOWN = sample(combinations(GOALS, TABS, HARDWARE), share=0.5, kind=itemgetter(0))


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
            back = PlanAnswer.model_validate(plan.answer)
            if back.model_dump(mode="json") != answer.model_dump(mode="json"):
                wrong.append((model, hardware, "reads back as another answer"))
            if model == "experts":
                assert back == answer, hardware
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


# A plan whose draft lacks something is told so on every page, and can be completed


WHOLE = stored_draft(serve_document(None))
BROKEN = {
    "nothing": {},
    "only a goal": {"goal": WHOLE["goal"]},
    "an empty goal": {**WHOLE, "goal": {}},
    "a goal that is gone": {**WHOLE, "goal": "paint"},
    "a field of another goal": {**WHOLE, "workload": {"lora_rank": 3}},
    "a value beyond its limit": {**WHOLE, "workload": {**WHOLE["workload"], "concurrency": 0}},
    "two that do not go together": {**WHOLE, "workload": {"max_request_tokens": 5}},
    "a list for a part": {**WHOLE, "hardware": ["rtx-4090"]},
    "a pin that nobody has": {**WHOLE, "pins": {"colour": "red"}},
}
FIELD_OF = {
    "nothing": "empty",
    "an empty goal": "goal",
    "a goal that is gone": "goal",
    "a field of another goal": "workload.lora_rank",
    "a value beyond its limit": "workload.concurrency",
    "two that do not go together": "workload.max_request_tokens",
    "a list for a part": "hardware",
    "a pin that nobody has": "pins.colour",
}
PAGES = ["", "alternatives/", "why/", "exports/", "history/", "offers/", "verdict/"]
PAGES += [f"edit/{slug}/" for slug in SLUGS]


@pytest.fixture
def broken_plans(team, alice) -> dict[str, Plan]:
    """A plan of each broken draft."""
    make = Plan.objects.create
    return {what: make(team=team, owner=alice, draft=draft) for what, draft in BROKEN.items()}


def test_every_page_of_it_answers_and_its_own_says_what_is_missing(alice, broken_plans):
    client, wrong = client_of(alice), []
    for what, plan in broken_plans.items():
        text = client.get(f"/plans/{plan.pk}/").content.decode()
        if "only a goal" not in what and "Not planned yet" not in text:
            wrong.append((what, text))
        for page in PAGES:
            status = client.get(f"/plans/{plan.pk}/{page}").status_code
            if status != 200:
                wrong.append((what, page, status))
    assert not wrong, wrong


def test_its_page_says_so_even_where_an_older_answer_is_stored(alice, serve_plan):
    plan_compute(serve_plan)
    Plan.objects.filter(pk=serve_plan.pk).update(draft={})
    page = client_of(alice).get(f"/plans/{serve_plan.pk}/").content.decode()
    assert "This plan is empty" in page


def test_going_through_the_wizard_completes_it(alice, broken_plans):
    client = client_of(alice)
    goal = {"goal": "serve", "objective": "cost", "latency_target": "none", "go": "next"}
    for what, plan in broken_plans.items():
        answer = client.post(f"/plans/{plan.pk}/edit/goal/", goal)
        plan.refresh_from_db()
        assert answer.status_code == 302, what
        assert plan.readable_document, what
        assert plan.answer["plans"], what


@pytest.mark.parametrize("action", ["launch", "compute", "suggestion", "delete"])
def test_no_button_fails_on_it(alice, broken_plans, action):
    client = client_of(alice)
    for what, plan in broken_plans.items():
        answer = client.post(f"/plans/{plan.pk}/{action}/", {"suggestion": "0"})
        assert answer.status_code in {302, 422}, what


def test_the_api_refuses_it_by_the_step_that_is_missing_and_keeping_it_names_it(
    alice, broken_plans
):
    client, wrong = client_of(alice), []
    for what, plan in broken_plans.items():
        for path in ("exports", "exports/vllm", "limits/most_users"):
            answer = client.get(f"/api/v1/plans/{plan.pk}/{path}")
            if not plan.readable_document and (
                answer.status_code != 422 or FIELD_OF[what] not in answer.json()["detail"]
            ):
                wrong.append((what, path, answer.content))
        if not plan.readable_document and (name := plan_keep(plan).name) != "Unfinished plan":
            wrong.append((what, name))
    assert not wrong, wrong


def test_what_a_draft_has_stays_when_it_is_completed():
    own = {"goal": "generate", "workload": {"batch_size": 7, "lora_rank": 3}, "hardware": []}
    document = read_stored(repaired(own))
    assert (document.goal, document.workload.batch_size) == ("generate", 7)
    assert (document.workload.input_tokens, document.percentile) == (1024, "p95")
    assert repaired({"goal": "paint"}) == {}


# The suggested changes of a plan that fits nowhere are searched once, when they are shown


@pytest.fixture
def unfitting(plan_of, monkeypatch):
    """A draft that fits nowhere, with its brief answer, and the full searches made for it."""
    made = plan_of("finetune", "catalog")
    made.draft["model"]["catalog_id"] = "meta-llama/Llama-3.1-70B"
    made.draft["hardware"] |= {"host": None, "device": "rtx-3060-12gb"}
    plan_compute(made, brief=True)
    searches, search = [], api.plan
    monkeypatch.setattr(api, "plan", lambda asked: searches.append(asked) or search(asked))
    return made, searches


def test_a_save_searches_no_suggestions_and_the_page_loads_them(unfitting, alice):
    made, searches = unfitting
    client, page = client_of(alice), f"/plans/{made.pk}/"

    plan_keep(made)
    shown = client.get(page).content.decode()

    assert not searches
    assert f"{page}offers/" in shown
    assert client.get(f"{page}?offers=1").content.decode().count('name="suggestion"') > 1
    assert client.get(f"{page}offers/").content.decode().count('name="suggestion"') > 1
    assert "offers/" not in client.get(page).content.decode()
    assert len(searches) == 1


def test_a_second_request_takes_what_the_first_has_stored(unfitting):
    made, searches = unfitting
    other = Plan.objects.get(pk=made.pk)
    assert current_answer(other) == current_answer(made)
    assert len(searches) == 1
