"""The steps: working defaults, saved after each change, errors beside their fields."""

import re

import pytest

from tests.webapp.conftest import client_of
from tests.webapp.wizard.conftest import STEPS

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("step", [*STEPS, "review"])
def test_each_step_shows_a_computed_verdict_by_its_defaults(walk, step):
    page = walk().page(step)

    assert page.status_code == 200
    assert page.context["verdict"].state in {"fits", "tight"}


@pytest.mark.parametrize("goal", ["serve", "generate", "finetune", "pretrain", "compress"])
def test_every_goal_leads_by_its_defaults_to_a_computed_plan(walk, goal):
    walker = walk()
    walker.press("goal", goal=goal)

    walker.to_review()

    assert walker.plan.answer["searched"]["strategies"] > 0


def test_next_four_times_ends_at_the_review(walk):
    walker = walk()

    walker.to_review()

    assert "Preflight &amp; launch" in walker.page("review").content.decode()


def test_next_leads_to_the_following_step(walk):
    walker = walk()

    assert walker.press("goal")["Location"] == walker.url("model")


def test_back_saves_what_was_typed_and_leads_to_the_step_before(walk):
    walker = walk()

    response = walker.press("workload", go="back", global_batch_size=4)

    assert response["Location"] == walker.url("model")
    assert walker.plan.draft["workload"]["pretrain"]["global_batch_size"] == 4


def test_update_without_javascript_stays_on_the_step(walk):
    walker = walk()

    assert walker.press("workload", go="stay")["Location"] == walker.url("workload")


def test_another_goal_keeps_the_workload_of_the_first(walk):
    walker = walk()
    walker.press("workload", global_batch_size=4)

    walker.press("goal", goal="serve")
    walker.press("workload", concurrency=3)
    walker.press("goal", goal="pretrain")

    assert walker.shown("workload")["global_batch_size"] == 4


def test_a_wrong_number_is_named_with_its_limits_beside_its_field(walk):
    walker = walk()

    page = walker.press("workload", sequence_length="many")

    assert page.status_code == 422
    assert "from 8 to 1,000,000" in page.context["form"].errors["sequence_length"][0]
    assert 'id="id_sequence_length_error"' in page.content.decode()


def test_what_is_wrong_is_not_saved(walk):
    walker = walk()

    walker.press("workload", sequence_length="0")

    assert walker.plan.draft["workload"]["pretrain"]["sequence_length"] == 256


def test_the_error_summary_links_to_the_field(walk):
    page = walk().press("workload", sequence_length="")

    assert 'href="#id_sequence_length"' in page.content.decode()


def test_a_training_run_without_an_end_is_refused(walk):
    page = walk().press("workload", time_budget_minutes="", million_tokens="")

    assert "time budget or a number of tokens" in str(page.context["form"].errors)


def test_a_compression_keeps_its_bits_as_a_number_and_what_goes(walk):
    walker = walk()
    walker.press("goal", goal="compress")

    walker.press("workload", method="norm_tweaking", bits="2", sparsity="20")

    assert walker.plan.draft["workload"]["compress"]["bits"] == 2
    assert walker.plan.draft["workload"]["compress"]["sparsity"] == "20"


@pytest.mark.parametrize("method", ["llm_pruner", "sheared_llama"])
def test_whole_heads_do_not_go_by_two_of_four(walk, method):
    walker = walk()
    walker.press("goal", goal="compress")

    page = walker.press("workload", method=method, sparsity="2:4")

    assert "Choose a share" in str(page.context["form"].errors["sparsity"])


def test_pins_are_kept_and_asked_of_the_planner(walk):
    walker = walk("?preset=serve")

    walker.press("hardware", **{"pin-weight_dtype": "int8"})

    assert walker.plan.request["pins"]["weight_dtype"] == "int8"


def test_a_wrong_pin_is_refused_beside_its_field(walk):
    page = walk().press("hardware", **{"pin-tensor_parallel_size": "0"})

    assert page.status_code == 422
    assert "tensor_parallel_size" in page.context["pins"].errors


def test_an_unknown_step_is_not_found(walk):
    walker = walk()

    assert walker.page("price").status_code == 404


@pytest.mark.parametrize("step", [*STEPS, "review"])
def test_another_team_finds_no_step(walk, charlie, step):
    walker = walk()

    assert client_of(charlie).get(walker.url(step)).status_code == 404


def test_another_team_cannot_save(walk, charlie):
    walker = walk()

    response = client_of(charlie).post(walker.url("goal"), {"goal": "serve"})

    assert response.status_code == 404
    assert walker.plan.draft["goal"]["goal"] == "pretrain"


def test_a_colleague_may_go_on_with_a_draft(walk, bob):
    walker = walk()

    assert client_of(bob).get(walker.url("goal")).status_code == 200


def test_a_viewer_may_not_change_a_draft(walk, vera):
    walker = walk()

    assert client_of(vera).get(walker.url("goal")).status_code == 403


def test_a_viewer_may_not_begin_a_plan(vera):
    assert client_of(vera).get("/plans/new/").status_code == 403


@pytest.mark.parametrize("step", [*STEPS, "review"])
def test_no_step_asks_the_database_more_often_than_a_bound(
    walk, step, django_assert_max_num_queries
):
    walker = walk()
    walker.page(step)

    with django_assert_max_num_queries(16):
        walker.page(step)


FOLDED = '<details class="disclosure">'
OPENED = '<details class="disclosure" open>'


@pytest.mark.parametrize("goal", ["finetune", "pretrain", "generate"])
def test_finer_choices_are_folded_until_one_of_them_is_made(walk, goal):
    made = {"generate": {"batching": "sorted", "decode_step": "compiled"}}.get(
        goal, {"attention": "eager", "lengths": "fixed", "on_spike": "skip"}
    )
    said = {"generate": "Batches and Decode step"}.get(
        goal, "Attention kernel and On a loss spike"
    )
    walker = walk()
    walker.press("goal", goal=goal)
    assert FOLDED in walker.page("workload").content.decode()

    walker.press("workload", go="stay", **made)
    text = walker.page("workload").content.decode()

    assert OPENED in text
    assert f"<summary>Advanced options: {said}</summary>" in text


@pytest.mark.parametrize(("goal", "field"), [("serve", "concurrency"), ("compress", "sparsity")])
def test_a_step_without_finer_choices_has_no_fold(walk, goal, field):
    walker = walk()
    walker.press("goal", goal=goal)

    text = walker.page("workload").content.decode()

    assert "Advanced options" not in text
    assert f'name="{field}"' in text


@pytest.mark.parametrize("goal", ["pretrain", "finetune"])
@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("a\nb\nc\nd", "These are 4 prompts, one a line. Give 3 at most."),
        ("x" * 501, "A prompt has 501 characters. It may have 500 at most."),
    ],
)
def test_prompts_that_are_too_many_or_too_long_are_refused_in_sight(walk, goal, lines, why):
    walker = walk()
    walker.press("goal", goal=goal)

    answer = walker.press("workload", go="stay", sample_prompts=lines)
    text = answer.content.decode() or walker.page("workload").content.decode()

    assert why in text
    assert "Advanced options: Prompts of the samples" in text


def test_prompts_are_kept_one_a_line(walk):
    walker = walk()
    walker.press("goal", goal="pretrain")

    walker.press(
        "workload", go="stay", sample_prompts="Once\r\n\r\n<b>Twice\r\n", text_samples="20"
    )

    text = walker.page("workload").content.decode()
    assert "Once\n&lt;b&gt;Twice</textarea>" in text
    assert "Advanced options: Text samples and Prompts of the samples" in text


def test_a_finer_choice_that_is_refused_is_in_sight(walk):
    walker = walk()
    walker.press("goal", goal="generate")

    response = walker.press("workload", go="stay", kv_cache="int4", guessing="lookup")

    text = response.content.decode()
    assert OPENED in text
    assert "Fewer bits run in batches only" in text


POOLS = {"pin-prefill_devices": 1, "pin-decode_devices": 3}


@pytest.fixture
def server_of_four(walk):
    """A serving plan on four catalog devices of one machine, at its hardware step."""
    walker = walk("?preset=serve")
    walker.press("hardware", choice="catalog", device="a100-sxm4-80gb", devices_per_node=4)
    return walker


def test_prompts_and_answers_are_planned_on_pools_of_their_own(server_of_four):
    server_of_four.press("hardware", **POOLS)

    plan = server_of_four.plan
    pools = {"prefill_devices": 1, "decode_devices": 3}
    assert plan.draft["pins"]["disaggregated"] == pools
    assert plan.request["pins"]["disaggregated"] == pools
    assert plan.answer["plans"][0]["strategy"]["disaggregated"] == pools
    page = server_of_four.page("hardware").content.decode()
    assert re.search(r'name="pin-decode_devices" value="3"', page)


def test_one_pool_without_the_other_is_named(server_of_four):
    page = server_of_four.press("hardware", **{"pin-prefill_devices": 2})

    assert page.context["pins"].errors == {
        "decode_devices": ["Two pools have two sizes: give both, or none."]
    }


def test_pools_go_when_their_numbers_are_emptied(server_of_four):
    server_of_four.press("hardware", **POOLS)

    server_of_four.press("hardware", **dict.fromkeys(POOLS, ""))

    assert server_of_four.plan.draft["pins"]["disaggregated"] is None
    assert "disaggregated" not in server_of_four.plan.request["pins"]


def test_a_training_has_no_pools_and_forgets_none(server_of_four):
    server_of_four.press("hardware", **POOLS)

    server_of_four.press("goal", goal="pretrain")

    page = server_of_four.page("hardware")
    assert "prefill_devices" not in page.context["pins"].fields
    assert "disaggregated" not in server_of_four.plan.request["pins"]
    assert server_of_four.plan.draft["pins"]["disaggregated"]["decode_devices"] == 3


def test_more_pools_than_devices_is_refused_in_words(server_of_four):
    server_of_four.press("hardware", **{"pin-prefill_devices": 8, "pin-decode_devices": 8})

    verdict = server_of_four.page("hardware").context["verdict"]
    assert verdict.state not in {"fits", "tight"}
    assert "16" in verdict.detail


def test_a_refused_step_shows_no_verdict_on_the_values_before(walk):
    walker = walk()

    page = walker.press("model", source="catalog", catalog_id="nobody/nothing")

    assert page.status_code == 422
    assert page.context["verdict"].state == "incomplete"
    assert "nobody/nothing" in page.context["verdict"].detail
    assert page.context["shape_words"] == ""
    assert "Not saved: correct the form first" in page.content.decode()
