"""The engine is a choice of the hardware step; a refusal that names another one offers it."""

import re

import pytest

from planner.catalog.engines import get_engine
from webapp.plans.engines import chosen_engine, engine_choices
from webapp.plans.errors import DraftProblem
from webapp.plans.launching import launch_of
from webapp.plans.planning import plan_keep
from webapp.wizard.drafts import GOALS

pytestmark = pytest.mark.django_db(databases="__all__")
T4 = {"choice": "catalog", "device": "t4"}


@pytest.fixture
def serving(walk):
    """A walker to serve gpt-oss on a T4, which vLLM refuses."""
    walker = walk()
    walker.press("goal", goal="serve", slo="none")
    walker.press("model", source="catalog", catalog_id="openai/gpt-oss-20b")
    walker.press("hardware", **T4)
    return walker


@pytest.mark.parametrize("goal", GOALS)
def test_each_goal_offers_the_engines_that_do_its_work(walk, goal):
    walker = walk()
    walker.press("goal", goal=goal)
    form = walker.page("hardware").context["form"]

    assert ("engine" in form.fields) == (goal != "compress")
    offered = dict(form.fields["engine"].choices) if goal != "compress" else {"": "Automatic"}
    assert list(offered) == ["", *engine_choices(goal)]
    assert ("deepspeed" in offered) == (goal in {"finetune", "pretrain"})
    assert ("vllm" in offered) == (goal in {"serve", "generate"})
    training = goal in {"finetune", "pretrain"}
    for key in engine_choices(goal):
        assert get_engine(key, "gpu", training=training).key == key


def test_automatic_is_what_was_planned_without_the_choice(serving):
    serving.press("model", source="catalog", catalog_id="meta-llama/Llama-3.2-1B")
    before = serving.plan.request

    serving.press("hardware", engine="")

    assert serving.plan.request == before
    assert before["engine"] == "vllm"


def test_a_refusal_that_names_another_engine_has_a_button_for_it(serving):
    page = serving.page("hardware")
    [shown] = re.findall(r'name="engine" value="(\w+)"', page.content.decode())
    assert (page.context["verdict"].state, shown) == ("refused", "llama_cpp")

    form = {"engine": shown, "step": "hardware", "revision": serving.plan.revision}
    answer = serving.client.post(f"/plans/{serving.plan_id}/suggestion/", form)

    assert answer["Location"] == serving.url("hardware")
    assert serving.plan.request["engine"] == "llama_cpp"
    page = serving.page("hardware")
    assert page.context["verdict"].state in {"fits", "tight", "slow"}
    assert page.context["form"]["engine"].value() == "llama_cpp"
    assert "llama.cpp" in next(
        each["summary"] for each in page.context["steps"] if each["name"] == "Hardware"
    )


@pytest.mark.parametrize("engine", ["deepspeed", "<script>", "vllm 9"])
def test_an_engine_that_the_goal_has_not_is_refused(serving, engine):
    assert serving.press("hardware", engine=engine).status_code == 422

    form = {"engine": engine, "revision": serving.plan.revision}
    answer = serving.client.post(f"/plans/{serving.plan_id}/suggestion/", form, follow=True)

    assert "lacks the field" in answer.content.decode()
    assert not serving.plan.draft["hardware"].get("engine")


def test_the_engine_is_kept_by_the_saved_plan_and_its_edit(serving):
    serving.press("hardware", engine="llama_cpp")
    saved = plan_keep(serving.plan)
    edited = serving.client.get(f"/plans/{saved.pk}/edit/hardware/", follow=True)

    assert saved.request["engine"] == "llama_cpp"
    assert edited.context["form"]["engine"].value() == "llama_cpp"
    assert edited.context["has_pins"]


def test_an_engine_of_another_goal_does_not_count(serving):
    serving.press("hardware", engine="llama_cpp")

    serving.press("goal", goal="finetune")

    assert chosen_engine(serving.plan.draft) is None


def test_a_plan_for_another_engine_is_exported_and_not_launched(walk, host):
    walker = walk()
    walker.press("hardware", choice=f"host:{host.pk}")
    assert walker.plan.request["engine"] == "torch"
    assert launch_of(walker.plan)

    walker.press("hardware", engine="deepspeed")

    with pytest.raises(DraftProblem, match="take its export") as caught:
        launch_of(walker.plan)
    assert caught.value.field == "engine"
    walker.press("hardware", engine="torch")
    assert launch_of(walker.plan)
