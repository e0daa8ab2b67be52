"""The model step: the catalog, a config, a folder, a model of the team."""

import json

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile

from webapp.modelhub.models import TeamModel
from webapp.modelhub.shapes import demo_config

pytestmark = pytest.mark.django_db
CONFIG = json.dumps(demo_config())


def errors(page) -> dict:
    assert page.status_code == 422
    return page.context["form"].errors


def test_a_catalog_model_is_found_without_regard_to_case(walk):
    walker = walk()

    walker.press("model", source="catalog", catalog_id="META-LLAMA/llama-3.2-1b")

    assert walker.plan.draft["model"]["catalog_id"] == "meta-llama/Llama-3.2-1B"


def test_a_quantised_checkpoint_of_a_catalog_model_is_kept_as_named(walk):
    walker = walk()

    walker.press("model", source="catalog", catalog_id="Qwen/Qwen3-8B-FP8")

    assert walker.plan.draft["model"]["catalog_id"] == "Qwen/Qwen3-8B-FP8"
    assert walker.plan.request["model"] == "Qwen/Qwen3-8B-FP8"


def test_an_unknown_model_is_refused_with_its_neighbours(walk):
    page = walk().press("model", source="catalog", catalog_id="meta-llama/Llama-9")

    assert "nearest" in errors(page)["catalog_id"][0]


def test_a_pasted_config_becomes_the_question(walk):
    walker = walk()

    walker.press("model", source="config", config=CONFIG)

    assert walker.plan.request["model"]["hidden_size"] == demo_config()["hidden_size"]


def test_an_uploaded_config_becomes_the_question(walk):
    walker = walk()
    upload = SimpleUploadedFile("config.json", CONFIG.encode())

    walker.press("model", source="config", config_file=upload)

    assert walker.plan.request["model"]["num_hidden_layers"] == demo_config()["num_hidden_layers"]


def test_a_config_that_lacks_a_field_is_refused_by_the_fields_name(walk):
    config = {key: value for key, value in demo_config().items() if key != "hidden_size"}

    page = walk().press("model", source="config", config=json.dumps(config))

    assert "hidden_size" in errors(page)["config"][0]


def test_text_that_is_no_json_is_refused_with_the_place(walk):
    page = walk().press("model", source="config", config='{"hidden_size": }')

    assert "line 1, column 17" in errors(page)["config"][0]


def test_a_list_is_no_config(walk):
    page = walk().press("model", source="config", config="[1, 2]")

    assert "one object in braces" in errors(page)["config"][0]


def test_weights_instead_of_a_config_are_refused(walk):
    upload = SimpleUploadedFile("model.safetensors", b"\xff\xfe\x00" * 10)

    page = walk().press("model", source="config", config_file=upload)

    assert "not text" in errors(page)["config_file"][0]


def test_a_file_that_is_too_long_is_refused_with_the_limit(walk):
    upload = SimpleUploadedFile("config.json", b" " * 300_000)

    page = walk().press("model", source="config", config_file=upload)

    assert "256 KiB" in errors(page)["config_file"][0]


@pytest.mark.parametrize("path", ["../secrets", "models/../../etc", ""])
def test_a_folder_that_climbs_or_has_no_name_is_refused(walk, path):
    page = walk().press("model", source="folder", path=path, folder_config=CONFIG)

    assert "path" in errors(page)


def test_a_folder_is_planned_by_its_config(walk):
    walker = walk()

    walker.press("model", source="folder", path="llama-tiny", folder_config=CONFIG)

    assert walker.plan.request["model"]["vocab_size"] == 4096


def test_a_model_of_the_team_is_planned_by_its_config(walk, team, host):
    model = TeamModel.objects.create(team=team, name="mine", source="config", config=demo_config())
    walker = walk()

    walker.press("model", source="team", team_model=model.pk)

    assert walker.plan.request["model"]["hidden_size"] == demo_config()["hidden_size"]


def test_another_teams_model_cannot_be_chosen(walk, other_team):
    model = TeamModel.objects.create(team=other_team, name="theirs", source="config", config={})

    page = walk().press("model", source="team", team_model=model.pk)

    assert "team_model" in errors(page)


def test_a_hostile_model_name_is_escaped(walk, team):
    name = "<script>alert(1)</script>"
    model = TeamModel.objects.create(team=team, name=name, source="config", config=demo_config())
    walker = walk()

    walker.press("model", source="team", team_model=model.pk)
    html = walker.page("review").content.decode()

    assert "<script>alert" not in html
    assert "&lt;script&gt;alert" in html


def test_workloads_are_shortened_to_what_the_model_reads_at_once(walk):
    walker = walk("?preset=serve")

    page = walker.client.post(
        walker.url("model"), {**walker.shown("model"), "source": "demo"}, follow=True
    )

    serve = walker.plan.draft["workload"]["serve"]
    context = demo_config()["max_position_embeddings"]
    assert serve["input_tokens"] + serve["output_tokens"] == context
    assert "workloads were shortened" in page.content.decode()


def test_the_rail_alone_shortens_nothing(walk):
    walker = walk("?preset=serve")
    data = {**walker.shown("model"), "source": "demo"}

    walker.client.post(
        f"/plans/{walker.plan_id}/verdict/?step=model", data, headers={"HX-Request": "true"}
    )

    assert walker.plan.draft["workload"]["serve"]["input_tokens"] == 1024
