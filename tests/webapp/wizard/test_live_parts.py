"""What stands beside a form follows it: the model card, the step strip, another model's work."""

import pytest

from tests.webapp.conftest import client_of
from webapp.hosts.checks import processor_words

pytestmark = pytest.mark.django_db
LLAMA_70B, LLAMA_405B = "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-405B"


def saved_live(walker, step, **changes):
    """Return what comes back when a form changes, as htmx sends it."""
    data = {**walker.shown(step), **changes}
    url = f"/plans/{walker.plan_id}/verdict/?step={step}"
    return walker.client.post(url, data, headers={"HX-Request": "true"}).content.decode()


def test_the_model_card_follows_the_model_that_was_typed(walk):
    walker = walk("?preset=serve")
    assert "8.03\N{NO-BREAK SPACE}B parameters" in walker.page("model").content.decode()

    html = saved_live(walker, "model", catalog_id=LLAMA_70B)

    card = html.split('id="shape-words"')[1].split("</span>")[0]
    assert 'hx-swap-oob="true"' in card
    assert "70.6\N{NO-BREAK SPACE}B parameters" in card
    assert "80 layers" in card


def test_a_model_that_is_not_known_leaves_no_other_models_card(walk):
    html = saved_live(walk("?preset=serve"), "model", catalog_id="no/such-model")

    card = html.split('id="shape-words"')[1].split("</span>")[0]
    assert "layers" not in card


def test_the_step_strip_follows_a_change(walk):
    html = saved_live(walk("?preset=serve"), "workload", concurrency=77)

    strip = html.split('id="steps"')[1].split("</ol>")[0]
    assert 'hx-swap-oob="true"' in strip
    assert "77 people" in strip


def test_strip_and_rail_say_that_they_are_being_computed(walk):
    html = walk().page("workload").content.decode()

    assert 'hx-indicator="#verdict, #steps"' in html
    assert 'id="steps"' in html


def test_the_rail_alone_is_still_what_a_get_returns(walk, vera):
    walker = walk()

    html = client_of(vera).get(f"/plans/{walker.plan_id}/verdict/").content.decode()

    assert "hx-swap-oob" not in html


@pytest.mark.parametrize("model", [LLAMA_70B, LLAMA_405B])
def test_the_demos_workload_does_not_leak_into_another_models_pre_training(walk, model):
    walker = walk()
    assert walker.plan.draft["workload"]["pretrain"]["sequence_length"] == 256

    walker.press("model", source="catalog", catalog_id=model)

    work = walker.plan.draft["workload"]["pretrain"]
    assert work["time_budget_minutes"] is None
    assert work["sequence_length"] == 4096
    assert work["global_batch_size"] == 1024
    assert work["million_tokens"] == pytest.approx(
        20 * float(model[-4:-1].strip("-")) * 1000, rel=0.02
    )


def test_the_first_verdict_of_a_newcomer_asks_no_more_than_the_demo_reads(walk):
    walker = walk()

    rail = walker.press("goal", go="stay", goal="serve") and walker.page("goal").content.decode()

    assert walker.plan.draft["model"]["source"] == "demo"
    assert "exceed the model" not in rail


@pytest.mark.parametrize("goal", ["serve", "generate"])
def test_another_model_than_the_demo_is_asked_for_the_usual_lengths(walk, goal):
    walker = walk()
    walker.press("goal", goal=goal)

    walker.press("model", source="catalog", catalog_id=LLAMA_70B)

    work = walker.plan.draft["workload"][goal]
    assert (work["input_tokens"], work["output_tokens"]) == (1024, 256)


def test_lengths_that_somebody_chose_stay_with_another_model(walk):
    walker = walk()
    walker.press("goal", goal="serve")
    walker.press("workload", input_tokens=100, output_tokens=20)

    walker.press("model", source="catalog", catalog_id=LLAMA_70B)

    work = walker.plan.draft["workload"]["serve"]
    assert (work["input_tokens"], work["output_tokens"]) == (100, 20)


def test_a_workload_that_somebody_chose_stays(walk):
    walker = walk()
    walker.press("workload", global_batch_size=3)

    walker.press("model", source="catalog", catalog_id=LLAMA_70B)

    work = walker.plan.draft["workload"]["pretrain"]
    assert (work["global_batch_size"], work["sequence_length"]) == (3, 256)


def test_the_demo_keeps_its_two_minutes(walk):
    walker = walk()

    walker.press("model")

    assert walker.plan.draft["workload"]["pretrain"]["time_budget_minutes"] > 0


@pytest.mark.parametrize(
    ("count", "words"), [(1, "Xeon, 1 logical CPU"), (2, "Xeon, 2 logical CPUs")]
)
def test_logical_cpus_are_not_called_processors(count, words):
    assert processor_words({"cpu_count": count, "cpu_model": "Xeon"}) == words
