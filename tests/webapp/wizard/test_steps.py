"""The steps: working defaults, saved after each change, errors beside their fields."""

import itertools
import re

import pytest
from django import forms
from django.test.html import parse_html

from planner.catalog.engines import get_engine
from runners.plans import fields
from runners.plans.data_set import DataSet
from runners.plans.document import GOALS, HardwareChoice, ModelChoice, RopeScaling
from runners.plans.engine_choice import chosen_engine, engine_choices
from runners.plans.refusals import DraftProblem
from tests.webapp.conftest import client_of
from tests.webapp.wizard.conftest import STEPS
from webapp.core.display import TIMES
from webapp.jobs.launching import launchable_of
from webapp.plans.exporting import exports_of
from webapp.plans.planning import current_answer, plan_keep
from webapp.wizard.forms import FormOfPart, Select

pytestmark = pytest.mark.django_db(databases="__all__")


def test_each_step_shows_a_computed_verdict_by_its_defaults(walk):
    for step in [*STEPS, "review"]:
        page = walk().page(step)
        assert page.status_code == 200, step
        assert page.context["verdict"].state in {"fits", "tight"}, step

    walker = walk()
    assert walker.page("price").status_code == 404


def test_every_goal_leads_by_its_defaults_to_a_computed_plan(walk):
    for goal in ["serve", "generate", "finetune", "pretrain", "compress"]:
        walker = walk()
        walker.press("goal", goal=goal)
        walker.to_review()
        assert walker.plan.answer["searched"]["strategies"] > 0, goal


def test_next_back_and_update_lead_to_their_step_and_save_what_was_typed(walk):
    walker = walk()
    assert walker.press("goal")["Location"] == walker.url("model")

    response = walker.press("workload", go="back", global_batch_size=4)
    assert response["Location"] == walker.url("model")
    assert walker.plan.draft["workload"]["global_batch_size"] == 4
    assert walker.press("workload", go="stay")["Location"] == walker.url("workload")

    refused = walker.press("workload", go="back", global_batch_size="many")
    assert refused["Location"] == walker.url("model")
    assert "are not saved: " in walker.page("model").content.decode()
    assert walker.plan.draft["workload"]["global_batch_size"] == 4

    walker.press("workload", global_batch_size=4)
    walker.press("goal", goal="serve")
    walker.press("workload", concurrency=3)
    walker.press("goal", goal="pretrain")
    assert walker.shown("workload")["global_batch_size"] == 4


def test_what_is_wrong_is_named_with_its_limits_beside_its_field_and_not_saved(walk):
    walker = walk()
    page = walker.press("workload", sequence_length="many")
    assert page.status_code == 422
    assert "from 8 to 1,000,000" in page.context["form"].errors["sequence_length"][0]
    assert 'id="id_sequence_length_error"' in page.content.decode()

    walker.press("workload", sequence_length="0")
    assert walker.plan.draft["workload"]["sequence_length"] == 256

    page = walk().press("workload", sequence_length="")
    assert 'href="#id_sequence_length"' in page.content.decode()

    page = walk().press("workload", time_budget_seconds="", tokens="")
    assert "time budget or a number of tokens" in str(page.context["form"].errors)
    walker = walk()
    walker.press("workload", time_budget_seconds="", tokens="0.5")
    values = walker.plan.draft["workload"]
    assert (values["time_budget_seconds"], values["tokens"]) == (None, 500_000)


def test_a_compression_keeps_its_bits_and_whole_heads_do_not_go_by_two_of_four(walk):
    walker = walk()
    walker.press("goal", goal="compress")
    walker.press("workload", method="norm_tweaking", bits="2", sparsity="20")
    assert walker.plan.draft["workload"]["bits"] == 2
    assert walker.plan.draft["workload"]["sparsity"] == "20"

    for method in ["llm_pruner", "sheared_llama"]:
        walker = walk()
        walker.press("goal", goal="compress")
        page = walker.press("workload", method=method, sparsity="2:4")
        assert "Choose a sparsity ratio" in str(page.context["form"].errors["sparsity"]), method


def test_pins_are_kept_and_asked_of_the_planner_or_refused_beside_their_field(walk):
    walker = walk("?preset=serve")
    walker.press("hardware", **{"pin-weight_dtype": "int8"})
    assert walker.plan.request["pins"]["weight_dtype"] == "int8"

    page = walk().press("hardware", **{"pin-tensor_parallel_size": "0"})
    assert page.status_code == 422
    assert "tensor_parallel_size" in page.context["pins"].errors


def test_another_team_finds_no_step_and_cannot_save(walk, charlie):
    for step in [*STEPS, "review"]:
        walker = walk()
        assert client_of(charlie).get(walker.url(step)).status_code == 404, step

    walker = walk()
    response = client_of(charlie).post(walker.url("goal"), {"goal": "serve"})
    assert response.status_code == 404
    assert walker.plan.draft["goal"] == "pretrain"


def test_a_colleague_may_go_on_with_a_draft_and_a_viewer_may_not(walk, bob, vera):
    walker = walk()
    assert client_of(bob).get(walker.url("goal")).status_code == 200
    assert client_of(vera).get(walker.url("goal")).status_code == 403
    assert client_of(vera).get("/plans/new/").status_code == 403


def test_no_step_asks_the_database_more_often_than_a_bound(walk, django_assert_max_num_queries):
    for step in [*STEPS, "review"]:
        walker = walk()
        walker.page(step)
        with django_assert_max_num_queries(16):
            walker.page(step)


FOLDED = '<details class="disclosure">'
OPENED = '<details class="disclosure" open>'


def test_finer_choices_are_folded_until_one_of_them_is_made(walk):
    for goal in ["finetune", "pretrain", "generate"]:
        made = {"generate": {"batching": "sorted", "compiled_step": "yes"}}.get(
            goal, {"attention": "eager", "length_schedule": "constant", "on_spike": "skip"}
        )
        said = {"generate": "Batches and Decode step"}.get(
            goal, "Attention kernel and On a loss spike"
        )
        walker = walk()
        walker.press("goal", goal=goal)
        assert FOLDED in walker.page("workload").content.decode(), goal

        walker.press("workload", go="stay", **made)
        text = walker.page("workload").content.decode()

        assert OPENED in text, goal
        assert f"<summary>Advanced options: {said}</summary>" in text, goal


def test_the_data_set_of_a_compression_is_its_only_fold_and_closed(walk):
    walker = walk()
    walker.press("goal", goal="compress")
    text = walker.page("workload").content.decode()
    folded = text.partition("<summary>Advanced options</summary>")[2].partition("</details>")[0]
    assert re.findall(r'name="(\w+)"', folded) == [*DataSet.model_fields]
    assert 'name="sparsity"' in text


def test_prompts_that_are_too_many_or_too_long_are_refused_in_sight(walk):
    for (lines, why), goal in itertools.product(
        [
            ("a\nb\nc\nd", "There are 4 prompts, one a line. Give 3 at most."),
            ("x" * 501, "A prompt has 501 characters. It may have 500 at most."),
        ],
        ["pretrain", "finetune"],
    ):
        walker = walk()
        walker.press("goal", goal=goal)

        answer = walker.press("workload", go="stay", sample_prompts=lines)
        text = answer.content.decode() or walker.page("workload").content.decode()

        assert why in text, (goal, why)
        assert "Advanced options: Prompts of the samples" in text, (goal, why)


def test_an_advanced_number_at_its_default_is_not_named_as_changed():
    class Work(fields.Part):
        noise: float = fields.field(0.0, "Noise", group="", ge=0, le=1)
        seconds: float | None = fields.field(120.0, "Time", factor=60.0, group="", ge=6, le=600)

    for sent, words in [
        ({"noise": "0", "seconds": "2"}, ""),
        ({"noise": "0.5", "seconds": "2.0"}, "Noise"),
        ({"noise": "", "seconds": "3"}, "Noise and Time"),
    ]:
        assert FormOfPart(sent, part=Work()).finer_words == words, sent
    assert FormOfPart(part=Work()).finer_words == ""


def test_prompts_are_kept_one_a_line(walk):
    walker = walk()
    walker.press("goal", goal="pretrain")

    walker.press(
        "workload",
        go="stay",
        sample_prompts="Once\r\n\r\n<b>Twice\r\n",
        text_samples_every_steps="20",
    )

    text = walker.page("workload").content.decode()
    assert "Once\n&lt;b&gt;Twice</textarea>" in text
    assert "Advanced options: Text samples and Prompts of the samples" in text


def test_a_finer_choice_that_is_refused_is_in_sight(walk):
    walker = walk()
    walker.press("goal", goal="generate")

    response = walker.press("workload", go="stay", kv_cache="int4", speculation="lookup")

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


def test_pools_come_in_pairs_and_go_when_their_numbers_are_emptied(server_of_four):
    page = server_of_four.press("hardware", **{"pin-prefill_devices": 2})
    assert page.context["pins"].errors == {
        "decode_devices": [
            "“Prefill devices” and “Decode devices” belong together: give both, or neither."
        ]
    }

    server_of_four.press("hardware", **POOLS)
    server_of_four.press("hardware", **dict.fromkeys(POOLS, ""))
    assert "disaggregated" not in server_of_four.plan.draft["pins"]
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


# The engine is a choice of the hardware step; a refusal that names another one offers it


T4 = {"choice": "catalog", "device": "t4"}


@pytest.fixture
def serving(walk):
    """A walker to serve gpt-oss on a T4, which vLLM and SGLang refuse."""
    walker = walk()
    walker.press("goal", goal="serve", latency_target="none")
    walker.press("model", source="catalog", catalog_id="openai/gpt-oss-20b")
    walker.press("hardware", **T4)
    return walker


def test_each_goal_offers_the_engines_that_do_its_work(walk):
    for goal in GOALS:
        walker = walk()
        walker.press("goal", goal=goal)
        form = walker.page("hardware").context["form"]

        assert ("engine" in form.fields) == (goal != "compress"), goal
        offered = dict(form.fields["engine"].choices) if goal != "compress" else {"": "Automatic"}
        assert list(offered) == ["", *engine_choices(goal)], goal
        assert ("deepspeed" in offered) == (goal in {"finetune", "pretrain"}), goal
        assert ("vllm" in offered) == (goal in {"serve", "generate"}), goal
        training = goal in {"finetune", "pretrain"}
        for key in engine_choices(goal):
            assert get_engine(key, "gpu", training=training).key == key, goal


def test_automatic_compares_the_engines_and_says_which_it_chose(serving):
    before = serving.plan.request
    verdict = serving.page("hardware").context["verdict"]
    assert (before["engine"], verdict.state) == ("auto", "fits")
    assert verdict.start == (
        "Planned for llama.cpp: needs a GGUF file of type MXFP4_MOE. "
        "Engines compared with it: vLLM and SGLang."
    )
    serving.press("hardware", engine="vllm")
    serving.press("hardware", engine="")
    assert serving.plan.request == before


def test_a_refusal_that_names_another_engine_has_a_button_for_it(serving):
    serving.press("hardware", engine="vllm")
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


def test_what_all_engines_refuse_says_so_and_offers_none_of_them(serving):
    serving.press("hardware", device="p40", **{"pin-weight_dtype": "fp8"})
    page = serving.page("hardware")
    assert page.context["verdict"].state == "refused"
    for words in ["No engine", "vllm: engine is", "sglang: engine is", "llama_cpp: weight_dtype"]:
        assert words in page.context["verdict"].detail, words
    assert page.context["engines"] == {}


def test_an_engine_that_the_goal_has_not_is_refused(serving):
    for engine in ["deepspeed", "<script>", "vllm 9"]:
        assert serving.press("hardware", engine=engine).status_code == 422, engine
        form = {"engine": engine, "revision": serving.plan.revision}
        answer = serving.client.post(f"/plans/{serving.plan_id}/suggestion/", form, follow=True)
        assert "lacks the field" in answer.content.decode(), engine
        assert not serving.plan.draft["hardware"].get("engine"), engine


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
    assert chosen_engine(serving.plan.document) is None


def test_a_plan_for_another_engine_is_exported_and_not_launched(walk, host):
    walker = walk()
    walker.press("hardware", choice=f"host:{host.pk}")
    assert walker.plan.request["engine"] == "torch"
    assert launchable_of(walker.plan)

    walker.press("hardware", engine="deepspeed")

    with pytest.raises(DraftProblem, match="Download the plan's export") as caught:
        launchable_of(walker.plan)
    assert caught.value.field == "engine"
    walker.press("hardware", engine="torch")
    assert launchable_of(walker.plan)


# The longest request of a serving plan: asked for, checked, and what the exports take


@pytest.fixture
def long_server(walk):
    walker = walk("?preset=serve")
    walker.press("hardware", choice="catalog", device="h100-sxm5-80gb", devices_per_node=1)
    return walker


def vllm_of(plan):
    return next(one.text for one in exports_of(plan, current_answer(plan)) if one.key == "vllm")


def test_the_longest_request_is_stated_or_the_models_context_where_memory_holds_it(long_server):
    assert long_server.plan.draft["workload"]["max_request_tokens"] is None
    assert "--max-model-len 131072" in vllm_of(long_server.plan)

    html = long_server.press("workload", max_request_tokens="1000").content.decode()
    assert "Longest request is 1,000 tokens, and a typical one has 1,280" in html

    long_server.press("workload", max_request_tokens="20000")
    assert "--max-model-len 20000" in vllm_of(long_server.plan)


def test_a_select_is_the_element_that_django_renders():
    choices = [("", "None"), ("a&b", "A <b>"), ("Group", [("c", "C"), (3, "three")])]
    for value in ("", "a&b", "c", 3, "other", None):
        attributes = {"id": "x", "aria-invalid": "true", "disabled": False, "required": True}
        ours, theirs = (
            kind(choices=choices).render("name", value, attributes)
            for kind in (Select, forms.Select)
        )
        assert parse_html(ours) == parse_html(theirs), value


def test_a_rotary_scaling_is_offered_where_it_is_taken_and_stretches_the_context(walk):
    walker, long = walk("?preset=serve"), {"input_tokens": "100000", "output_tokens": "1000"}
    document = walker.plan.document
    for model, engine, offered in [
        ({"catalog_id": "Qwen/Qwen3-8B"}, None, {"", "yarn", "linear", "dynamic"}),
        ({"catalog_id": "Qwen/Qwen3-8B"}, "llama_cpp", {"", "yarn"}),
        ({"catalog_id": "Qwen/Qwen3-8B"}, "sglang", set()),
        ({"catalog_id": "openai-community/gpt2"}, "vllm", set()),
        (
            {"source": "config", "config": {"rope_parameters": {"full_attention": {}}}},
            "vllm",
            set(),
        ),
        ({"catalog_id": "Qwen/Qwen3-8B"}, "vllm", {"", "yarn", "linear", "dynamic"}),
    ]:
        document.model = ModelChoice(**{"source": "catalog"} | model)
        document.hardware = HardwareChoice(device="h100-sxm5-80gb", engine=engine)
        plan = walker.plan
        plan.document = document
        plan.save()
        field = walker.page("workload").context["form"].fields.get("rope_type")
        assert ({key for key, _ in field.choices} if field else set()) == offered, (model, engine)

    refused = {
        "factor": {"rope_type": "yarn"},
        "beta_fast": {"rope_type": "yarn", "factor": "4", "beta_fast": "0"},
        "rope_type": {"rope_type": "longrope", "factor": "4"},
    }
    for name, posted in refused.items():
        assert name in walker.press("workload", **posted).context["form"].errors, posted
    stretched = {"rope_type": "yarn", "factor": "4", "original_max_position_embeddings": "32768"}
    assert walker.press("workload", **long, **stretched).status_code == 302
    chosen = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768)
    assert walker.plan.document.model.rope_scaling == chosen
    assert walker.plan.answer["plans"]
    assert f"context {TIMES} 4" in walker.page("review").content.decode()
    assert walker.press("workload", rope_type="").status_code == 302
    assert walker.plan.document.model.rope_scaling is None
