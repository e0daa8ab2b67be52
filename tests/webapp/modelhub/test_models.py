"""The model pages: catalog, team models, a pasted config, where a model fits."""

import json
import re

import pytest

from planner.catalog.models import list_models
from tests.webapp.conftest import client_of
from webapp.modelhub.models import TeamModel
from webapp.modelhub.shapes import (
    demo_config,
    kv_bytes_per_token,
    num_parameters,
    parameter_parts,
    shape_of,
)

pytestmark = pytest.mark.django_db
LLAMA = "/models/meta-llama/Llama-3.1-8B/"


def text(user, path: str) -> str:
    response = client_of(user).get(path)
    assert response.status_code == 200
    return response.content.decode()


def new_model(user, **data):
    return client_of(user).post("/models/new/", {"name": "mine", **data})


def test_the_list_shows_every_catalog_model(alice):
    html = text(alice, "/models/")

    assert all(f"/models/{entry.id}/" in html for entry in list_models())


def test_the_list_filters_by_every_word(alice):
    html = text(alice, "/models/?q=llama+70b")

    assert "Llama-3.1-70B" in html
    assert "Llama-3.1-8B<" not in html


def test_a_name_that_is_not_there_is_said(alice):
    assert "no model like" in text(alice, "/models/?q=zzz")


def test_a_catalog_model_shows_its_published_size(alice):
    assert "8.03\u00a0B parameters in 32 layers" in text(alice, LLAMA)


def test_the_parts_add_up_to_all_parameters():
    shape = shape_of(demo_config())

    assert sum(part.parameters for part in parameter_parts(shape)) == num_parameters(shape)


def test_half_the_bytes_an_element_take_half_the_cache():
    sizes = dict(kv_bytes_per_token(shape_of(demo_config())))

    assert sizes["bf16"] == sizes["fp32"] / 2 == sizes["fp8"] * 2


def test_a_model_says_on_which_hosts_it_fits(alice, host):
    html = text(alice, LLAMA)

    assert host.name in html
    assert "Does not fit" in html or "Fits" in html


def test_a_quantised_checkpoint_of_a_catalog_model_has_a_page_of_its_own(alice):
    page = client_of(alice).get("/models/Qwen/Qwen3-8B-FP8/").content.decode()

    assert '<h1 class="break">Qwen/Qwen3-8B-FP8</h1>' in page
    assert "block of 128 x 128" in page


def test_a_model_that_the_catalog_does_not_know_is_not_found(alice):
    assert client_of(alice).get("/models/nobody/nothing/").status_code == 404


def test_a_pasted_config_becomes_a_model_of_the_team(alice, team):
    response = new_model(alice, config=json.dumps(demo_config()))

    model = TeamModel.objects.get()
    assert response["Location"] == f"/models/{model.pk}/"
    assert model.team == team
    assert model.num_parameters == num_parameters(shape_of(demo_config()))


def test_a_config_without_a_field_is_refused_by_the_fields_name(alice):
    config = {key: value for key, value in demo_config().items() if key != "vocab_size"}

    response = new_model(alice, config=json.dumps(config))

    assert response.status_code == 422
    assert "vocab_size" in response.context["form"].errors["config"][0]


def test_a_family_that_is_not_known_is_refused_by_name(alice):
    response = new_model(alice, config='{"model_type": "perceptron"}')

    assert "perceptron" in response.context["form"].errors["config"][0]


def test_nothing_pasted_is_refused(alice):
    assert "Paste the config.json" in str(new_model(alice).context["form"].errors)


def test_a_viewer_may_not_add_a_model(vera):
    assert new_model(vera, config=json.dumps(demo_config())).status_code == 403
    assert not TeamModel.objects.exists()


@pytest.fixture
def own(team, host) -> TeamModel:
    name = "<b>bold</b>"
    facts = {"perplexity": 210.4}
    return TeamModel.objects.create(
        team=team, name=name, source="job", config=demo_config(), host=host, facts=facts
    )


@pytest.mark.parametrize("preset", ["quantize", "endpoint", "generate", "benchmark"])
def test_a_model_with_weights_is_put_to_use_in_one_press(alice, own, preset):
    assert f"preset={preset}&amp;model={own.pk}" in text(alice, f"/models/{own.pk}/")


def test_a_model_that_is_narrow_already_is_not_compressed_again(alice, own):
    own.weight_dtype = "fp8"
    own.save()

    assert "preset=quantize" not in text(alice, f"/models/{own.pk}/")


def test_what_was_measured_stands_in_words_with_units(alice, own):
    own.facts = {"perplexity": 210.4, "measured": {"peak_memory_bytes": 512 * 1024**2}}
    own.save()

    page = text(alice, f"/models/{own.pk}/")

    assert re.search(r"Peak memory</dt><dd class=\"num\">512<span class=\"unit\">MiB", page)
    assert "peak_memory_bytes" not in page


def test_a_hostile_name_is_escaped(alice, own):
    assert "<b>bold" not in text(alice, f"/models/{own.pk}/")
    assert "<b>bold" not in text(alice, "/models/")


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

    with django_assert_max_num_queries(6):
        client.get("/models/")
