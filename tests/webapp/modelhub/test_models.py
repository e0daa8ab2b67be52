"""The model pages: catalog, team models, a pasted config, shapes, where a model fits."""

import json
import re

import pytest
from django.utils.html import escape

from planner.catalog.models import find_model, get_model, list_models
from tests.plugins.extent import first
from tests.webapp.conftest import client_of
from webapp.core.clock import now
from webapp.hosts.models import Host
from webapp.modelhub.models import (
    TeamModel,
    demo_config,
    kv_bytes_per_token,
    num_parameters,
    parameter_parts,
)
from webapp.pages.model_catalog import PAGE_SIZE

pytestmark = pytest.mark.django_db
LLAMA = "/models/meta-llama/Llama-3.1-8B/"


def text(user, path: str) -> str:
    response = client_of(user).get(path)
    assert response.status_code == 200
    return response.content.decode()


def new_model(user, **data):
    return client_of(user).post("/models/new/", {"name": "mine", **data})


def test_the_list_filters_every_catalog_model_by_every_word(alice):
    pages = range(1, -(-len(list_models()) // PAGE_SIZE) + 1)
    html = "".join(text(alice, f"/models/?page={number}") for number in pages)
    assert all(f"/models/{entry.id}/" in html for entry in list_models())

    html = text(alice, "/models/?q=llama+70b")
    assert "Llama-3.1-70B" in html
    assert "Llama-3.1-8B<" not in html
    assert "no model like" in text(alice, "/models/?q=zzz")


def test_a_catalog_model_shows_its_published_size_and_where_it_fits(alice, host):
    assert "8.03\u00a0B parameters in 32 layers" in text(alice, LLAMA)
    html = text(alice, LLAMA)
    assert host.name in html
    assert "Does not fit" in html or "Fits" in html


def test_the_parts_add_up_and_half_the_bytes_an_element_take_half_the_cache():
    shape = find_model(demo_config())
    assert sum(part.parameters for part in parameter_parts(shape)) == num_parameters(shape)
    sizes = dict(kv_bytes_per_token(find_model(demo_config())))
    assert sizes["bf16"] == sizes["fp32"] / 2 == sizes["fp8"] * 2


def test_a_quantised_checkpoint_has_a_page_and_what_is_not_there_none(alice):
    page = client_of(alice).get("/models/Qwen/Qwen3-8B-FP8/").content.decode()
    assert '<h1 class="break">Qwen/Qwen3-8B-FP8</h1>' in page
    assert "block of 128 x 128" in page
    assert client_of(alice).get("/models/nobody/nothing/").status_code == 404

    for path in [
        "nobody/nothing",
        "../../etc/passwd",
        "a" * 2000,
        "<b>",
        "meta-llama/Llama-3.1-8B/x",
    ]:
        assert client_of(alice).get(f"/models/{path}/").status_code == 404, path


def test_a_pasted_config_becomes_a_model_of_the_team(alice, team):
    response = new_model(alice, config=json.dumps(demo_config()))
    model = TeamModel.objects.get()
    assert response["Location"] == f"/models/{model.pk}/"
    assert model.team == team
    assert model.num_parameters == num_parameters(find_model(demo_config()))


def test_a_config_without_a_field_is_refused_by_the_fields_name(alice):
    config = {key: value for key, value in demo_config().items() if key != "vocab_size"}
    response = new_model(alice, config=json.dumps(config))
    assert response.status_code == 422
    assert "vocab_size" in response.context["form"].errors["config"][0]


def test_a_family_that_is_not_known_is_refused_by_name(alice):
    response = new_model(alice, config='{"model_type": "perceptron"}')
    assert "perceptron" in response.context["form"].errors["config"][0]


def test_nothing_pasted_or_by_a_viewer_becomes_a_model(alice, vera):
    assert "paste the content of config.json" in str(new_model(alice).context["form"].errors)

    assert new_model(vera, config=json.dumps(demo_config())).status_code == 403
    assert not TeamModel.objects.exists()


@pytest.fixture
def own(team, host) -> TeamModel:
    name = "<b>bold</b>"
    facts = {"perplexity": 210.4}
    return TeamModel.objects.create(
        team=team, name=name, source="job", config=demo_config(), host=host, facts=facts
    )


def test_a_model_with_weights_is_put_to_use_in_one_press_but_not_compressed_twice(alice, own):
    for preset in ["quantize", "endpoint", "generate", "benchmark"]:
        assert f"preset={preset}&amp;model={own.pk}" in text(alice, f"/models/{own.pk}/"), preset

    own.weight_dtype = "fp8"
    own.save()
    assert "preset=quantize" not in text(alice, f"/models/{own.pk}/")


def test_what_was_measured_stands_in_words_with_units(alice, own):
    own.facts = {"perplexity": 210.4, "measured": {"peak_memory_bytes": 512 * 1024**2}}
    own.save()
    page = text(alice, f"/models/{own.pk}/")
    assert re.search(r"Peak memory</dt><dd class=\"num\">512<span class=\"unit\">MiB", page)
    assert "peak_memory_bytes" not in page


def test_another_team_finds_no_model(charlie, own):
    assert client_of(charlie).get(f"/models/{own.pk}/").status_code == 404
    assert "&lt;b&gt;bold" not in text(charlie, "/models/")


def test_a_config_of_an_unknown_family_still_has_a_page(alice, own):
    own.config = {"model_type": "perceptron"}
    own.save()
    assert "does not cover this architecture" in text(alice, f"/models/{own.pk}/")


def test_the_list_asks_the_database_as_often_for_many_models(
    alice, own, django_assert_max_num_queries
):
    client = client_of(alice)
    for number in range(20):
        TeamModel.objects.create(team=own.team, name=f"model {number}", host=own.host)
    with django_assert_max_num_queries(7):  # with the host that each model is said to fit
        client.get("/models/")


# Shapes against published counts, where a model fits, names and bounds of the model pages


IDS = [entry.id for entry in list_models()]


def test_a_shape_has_its_published_parameters_and_bytes_of_context():
    for model, count in [  # as their safetensors files hold them
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("meta-llama/Llama-3.1-70B", 70_553_706_496),
        ("HuggingFaceTB/SmolLM2-135M", 134_515_008),
        ("meta-llama/Llama-3.2-1B", 1_235_814_400),
        ("mistralai/Mixtral-8x7B-v0.1", 46_702_792_704),
    ]:
        assert num_parameters(get_model(model)) == count, model

    for model, bytes_ in [
        ("meta-llama/Llama-3.1-8B", 131_072),
        ("meta-llama/Llama-3.1-70B", 327_680),
    ]:
        assert dict(kv_bytes_per_token(get_model(model)))["bf16"] == bytes_, model


def test_the_parts_of_every_catalog_model_add_up_to_a_whole():
    for model in IDS:
        shape = get_model(model)
        parts = parameter_parts(shape)
        assert sum(part.parameters for part in parts) == num_parameters(shape), model
        assert sum(part.share for part in parts) == pytest.approx(1), model


def test_a_catalog_model_of_every_family_has_a_page_of_its_own(alice):
    client = client_of(alice)
    families = {get_model(model).model_type: model for model in reversed(IDS)}
    rest = [model for model in IDS if model not in families.values()]
    wrong = []
    for model in first([*families.values(), *rest], len(families)):
        response = client.get(f"/models/{model}/")
        shown = response.context["parameters"] if response.status_code == 200 else None
        if shown != num_parameters(get_model(model)):
            wrong.append((model, response.status_code, shown))
    assert not wrong, wrong


def test_a_config_or_a_name_that_is_no_models_has_no_shape():
    for model in ["", "nothing", "meta-llama/", "a" * 500, "\x00"]:
        assert find_model(model) is None, model
    for config in [{}, {"model_type": "perceptron"}, {"model_type": "llama"}]:
        assert find_model(config) is None, config


def test_a_strange_filter_is_answered_and_escaped(alice):
    for query in ["<script>x", "%25", "a" * 3000, "llama%20llama", "'"]:
        response = client_of(alice).get(f"/models/?q={query}")
        assert response.status_code == 200, query
        assert "<script>x" not in response.content.decode(), query


# Where it fits


def fits(user, model="meta-llama/Llama-3.1-8B") -> dict:
    rows = client_of(user).get(f"/models/{model}/").context["fits"]
    return {dtype: is_there for row in rows for dtype, is_there, _ in row.cells}


def test_which_widths_fit_follows_the_size_of_the_model(alice, host):
    assert fits(alice) == {"bf16": False, "int8": True, "int4": True}
    assert set(fits(alice, "HuggingFaceTB/SmolLM2-135M").values()) == {True}
    assert set(fits(alice, "meta-llama/Llama-3.1-405B").values()) == {False}


def test_a_host_that_is_foreign_retired_or_not_measured_is_left_out(alice, charlie, host):
    known = {"state": host.state, "microbench": host.microbench}
    assert fits(alice)
    assert fits(charlie) == {}
    for changes in ({"state": "retired"}, {"microbench": {}}):
        Host.objects.update(**{**known, **changes})
        assert fits(alice) == {}, changes


def test_a_model_page_asks_the_database_no_more_than_a_bound(
    alice, host, django_assert_max_num_queries
):
    client = client_of(alice)
    with django_assert_max_num_queries(8):
        client.get("/models/meta-llama/Llama-3.1-8B/")


# Models of the team


def add(user, **data):
    fields = {"name": "mine", "config": json.dumps(demo_config())}
    return client_of(user).post("/models/new/", {**fields, **data})


def test_a_model_needs_a_name_of_bearable_length(alice):
    for name, status in [
        ("mine", 302),
        ("größe 模型", 302),
        ("x" * 120, 302),
        ("x" * 121, 422),
        ("", 422),
        ("  ", 422),
    ]:
        assert add(alice, name=name).status_code == status, name


def test_a_hostile_name_is_text_on_every_page(alice):
    client = client_of(alice)
    for name in ("<img src=x>", "{{ 7|add:7 }}", "'\"--", "../../x"):
        add(alice, name=name)
        model = TeamModel.objects.get(name=name)
        for path in ("/models/", f"/models/{model.pk}/", f"/search/?q={name[:3]}"):
            html = client.get(path).content.decode()
            assert "<img src=x>" not in html, path
            assert escape(name) in html, path


def test_two_models_may_share_their_name_and_what_was_wrong_stays_in_the_form(alice):
    add(alice)
    add(alice)
    assert TeamModel.objects.count() == 2
    assert 'value="kept"' in add(alice, name="kept", config="{").content.decode()


def test_a_team_model_is_planned_from_its_page_by_a_colleague(alice, bob, host):
    add(alice)
    model = TeamModel.objects.get()
    response = client_of(bob).get(f"/plans/new/?preset=quantize&model={model.pk}")
    assert response.status_code == 302


def test_an_odd_model_or_one_without_its_host_still_has_its_page(alice, team, host):
    for config in [{}, {"model_type": "perceptron"}, {"hidden_size": "x"}]:
        model = TeamModel.objects.create(team=team, name="odd", source="config", config=config)
        assert client_of(alice).get(f"/models/{model.pk}/").status_code == 200, config

    model = TeamModel.objects.create(
        team=team, name="left", source="job", config=demo_config(), host=host
    )
    Host.objects.all().delete()
    assert client_of(alice).get(f"/models/{model.pk}/").status_code == 200


def test_a_model_links_the_job_that_made_it_only_while_there_is_one(alice, team, job):
    facts = {"job": job.pk, "measured": {"perplexity": 60.0}}
    model = TeamModel.objects.create(
        team=team, name="made", source="folder", config=demo_config(), facts=facts
    )
    assert f"/jobs/{job.pk}/" in text(alice, f"/models/{model.pk}/")
    type(job).objects.update(deleted_at=now())
    html = text(alice, f"/models/{model.pk}/")
    assert f"/jobs/{job.pk}/" not in html
    assert "the job is deleted" in html
