"""Shapes against published counts, where a model fits, names and bounds of the model pages."""

import json

import pytest
from django.utils.html import escape

from planner.catalog.models import get_model, list_models
from tests.webapp.conftest import client_of
from webapp.hosts.models import Host
from webapp.modelhub.models import TeamModel
from webapp.modelhub.shapes import (
    catalog_shape,
    demo_config,
    kv_bytes_per_token,
    num_parameters,
    parameter_parts,
    shape_of,
)

pytestmark = pytest.mark.django_db
IDS = [entry.id for entry in list_models()]


@pytest.mark.parametrize(
    ("model", "count"),
    [  # as their safetensors files hold them
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("meta-llama/Llama-3.1-70B", 70_553_706_496),
        ("HuggingFaceTB/SmolLM2-135M", 134_515_008),
        ("meta-llama/Llama-3.2-1B", 1_235_814_400),
        ("mistralai/Mixtral-8x7B-v0.1", 46_702_792_704),
    ],
)
def test_a_shape_has_its_published_number_of_parameters(model, count):
    assert num_parameters(get_model(model)) == count


def test_the_parts_of_every_catalog_model_add_up_to_a_whole():
    for model in IDS:
        shape = get_model(model)
        parts = parameter_parts(shape)

        assert sum(part.parameters for part in parts) == num_parameters(shape), model
        assert sum(part.share for part in parts) == pytest.approx(1), model


@pytest.mark.parametrize(
    ("model", "bytes_"),
    [("meta-llama/Llama-3.1-8B", 131_072), ("meta-llama/Llama-3.1-70B", 327_680)],
)
def test_a_token_of_context_takes_its_known_bytes_in_bf16(model, bytes_):
    assert dict(kv_bytes_per_token(get_model(model)))["bf16"] == bytes_


def test_every_catalog_model_has_a_page_of_its_own(alice):
    client = client_of(alice)

    for model in IDS:
        response = client.get(f"/models/{model}/")

        assert response.status_code == 200, model
        assert response.context["parameters"] == num_parameters(get_model(model)), model


@pytest.mark.parametrize("model", ["", "nothing", "meta-llama/", "a" * 500, "\x00"])
def test_a_name_that_the_catalog_does_not_know_has_no_shape(model):
    assert catalog_shape(model) is None


@pytest.mark.parametrize("config", [{}, {"model_type": "perceptron"}, {"model_type": "llama"}])
def test_a_config_that_describes_no_model_has_no_shape(config):
    assert shape_of(config) is None


@pytest.mark.parametrize(
    "path",
    ["nobody/nothing", "../../etc/passwd", "a" * 2000, "<b>", "meta-llama/Llama-3.1-8B/x"],
)
def test_a_model_that_is_not_there_is_not_found(alice, path):
    assert client_of(alice).get(f"/models/{path}/").status_code == 404


@pytest.mark.parametrize("query", ["<script>x", "%25", "a" * 3000, "llama%20llama", "'"])
def test_a_strange_filter_is_answered_and_escaped(alice, query):
    response = client_of(alice).get(f"/models/?q={query}")

    assert response.status_code == 200
    assert "<script>x" not in response.content.decode()


# Where it fits


def fits(user, model="meta-llama/Llama-3.1-8B") -> dict:
    rows = client_of(user).get(f"/models/{model}/").context["fits"]
    return {dtype: is_there for row in rows for dtype, is_there, _ in row.cells}


def test_narrow_weights_fit_where_wide_ones_do_not(alice, host):
    assert fits(alice) == {"bf16": False, "int8": True, "int4": True}


def test_a_small_model_fits_in_every_width(alice, host):
    assert set(fits(alice, "HuggingFaceTB/SmolLM2-135M").values()) == {True}


def test_a_large_model_fits_in_none(alice, host):
    assert set(fits(alice, "meta-llama/Llama-3.1-405B").values()) == {False}


def test_a_host_that_was_not_measured_is_left_out(alice, host):
    Host.objects.update(microbench={})

    assert fits(alice) == {}


def test_a_retired_host_is_left_out(alice, host):
    Host.objects.update(state="retired")

    assert fits(alice) == {}


def test_another_teams_host_is_left_out(charlie, host):
    assert fits(charlie) == {}


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


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("mine", 302),
        ("größe 模型", 302),
        ("x" * 120, 302),
        ("x" * 121, 422),
        ("", 422),
        ("  ", 422),
    ],
)
def test_a_model_needs_a_name_of_bearable_length(alice, name, status):
    assert add(alice, name=name).status_code == status


@pytest.mark.parametrize("name", ["<img src=x>", "{{ 7|add:7 }}", "'\"--", "../../x"])
def test_a_hostile_name_is_text_on_every_page(alice, name):
    add(alice, name=name)
    model = TeamModel.objects.get()

    for path in ("/models/", f"/models/{model.pk}/", f"/search/?q={name[:3]}"):
        html = client_of(alice).get(path).content.decode()
        assert "<img src=x>" not in html
        assert escape(name) in html


def test_two_models_may_share_their_name(alice):
    add(alice)
    add(alice)

    assert TeamModel.objects.count() == 2


def test_what_was_wrong_stays_in_the_form(alice):
    page = add(alice, name="kept", config="{").content.decode()

    assert 'value="kept"' in page


def test_a_team_model_is_planned_from_its_page_by_a_colleague(alice, bob, host):
    add(alice)
    model = TeamModel.objects.get()

    response = client_of(bob).get(f"/plans/new/?preset=quantize&model={model.pk}")

    assert response.status_code == 302


@pytest.mark.parametrize("config", [{}, {"model_type": "perceptron"}, {"hidden_size": "x"}])
def test_a_stored_config_that_is_not_covered_still_has_its_page(alice, team, config):
    model = TeamModel.objects.create(team=team, name="odd", source="config", config=config)

    assert client_of(alice).get(f"/models/{model.pk}/").status_code == 200


def test_a_model_whose_host_is_gone_still_has_its_page(alice, team, host):
    model = TeamModel.objects.create(
        team=team, name="left", source="job", config=demo_config(), host=host
    )
    Host.objects.all().delete()

    assert client_of(alice).get(f"/models/{model.pk}/").status_code == 200
