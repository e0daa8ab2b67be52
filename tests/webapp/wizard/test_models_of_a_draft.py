"""The model step: the catalog, a config.json a folder, one of the team."""

import json

import pytest
from django import forms
from django.core.files.uploadedfile import SimpleUploadedFile
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.catalog.devices import devices_of_every_size
from webapp.modelhub.models import TeamModel, demo_config
from webapp.wizard.combobox import device_choices
from webapp.wizard.forms import parse_config, read_upload

pytestmark = pytest.mark.django_db
CONFIG = json.dumps(demo_config())


def errors(page) -> dict:
    assert page.status_code == 422
    return page.context["form"].errors


def test_a_catalog_model_is_found_without_regard_to_case_and_kept_as_named(walk):
    walker = walk()
    walker.press("model", source="catalog", catalog_id="META-LLAMA/llama-3.2-1b")
    assert walker.plan.draft["model"]["catalog_id"] == "meta-llama/Llama-3.2-1B"

    walker.press("model", source="catalog", catalog_id="Qwen/Qwen3-8B-FP8")
    assert walker.plan.draft["model"]["catalog_id"] == "Qwen/Qwen3-8B-FP8"
    assert walker.plan.request["model"] == "Qwen/Qwen3-8B-FP8"


def test_what_is_no_model_is_refused_by_the_lack_or_the_place(walk):
    page = walk().press("model", source="catalog", catalog_id="meta-llama/Llama-9")
    assert "nearest" in errors(page)["catalog_id"][0]

    config = {key: value for key, value in demo_config().items() if key != "hidden_size"}
    page = walk().press("model", source="config", config=json.dumps(config))
    assert "hidden_size" in errors(page)["config"][0]

    page = walk().press("model", source="config", config='{"hidden_size": }')
    assert "line 1, column 17" in errors(page)["config"][0]

    page = walk().press("model", source="config", config="[1, 2]")
    assert "not a JSON object" in errors(page)["config"][0]

    upload = SimpleUploadedFile("model.safetensors", b"\xff\xfe\x00" * 10)
    page = walk().press("model", source="config", config_file=upload)
    assert "not text" in errors(page)["config_file"][0]

    upload = SimpleUploadedFile("config.json", b" " * 300_000)
    page = walk().press("model", source="config", config_file=upload)
    assert "256 KiB" in errors(page)["config_file"][0]


def test_a_pasted_or_uploaded_config_becomes_the_question(walk):
    walker = walk()
    walker.press("model", source="config", config=json.dumps(demo_config() | {"vocab_size": 999}))
    assert walker.plan.request["model"]["vocab_size"] == 999

    config = json.dumps(demo_config() | {"num_hidden_layers": 3})
    upload = SimpleUploadedFile("config.json", config.encode())
    walker.press("model", source="config", config_file=upload)
    assert walker.plan.request["model"]["num_hidden_layers"] == 3


def test_a_folder_or_a_model_of_the_team_is_planned_by_its_config(walk, team, host):
    walker = walk()
    walker.press("model", source="folder", path="llama-tiny", folder_config=CONFIG)
    assert walker.plan.request["model"]["vocab_size"] == 4096

    config = demo_config() | {"vocab_size": 999}
    model = TeamModel.objects.create(team=team, name="mine", source="config", config=config)
    walker.press("model", source="team", team_model=model.pk)
    assert walker.plan.request["model"]["vocab_size"] == 999


def test_another_teams_model_or_a_folder_that_climbs_is_refused(walk, other_team):
    model = TeamModel.objects.create(team=other_team, name="theirs", source="config", config={})
    page = walk().press("model", source="team", team_model=model.pk)
    assert "team_model" in errors(page)

    for path in ["../secrets", "models/../../etc", ""]:
        page = walk().press("model", source="folder", path=path, folder_config=CONFIG)
        assert "path" in errors(page), path


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

    serve = walker.plan.draft["workload"]
    context = demo_config()["max_position_embeddings"]
    assert serve["input_tokens"] + serve["output_tokens"] == context
    assert "workloads were shortened" in page.content.decode()


def test_the_rail_alone_shortens_nothing(walk):
    walker = walk("?preset=serve")
    data = {**walker.shown("model"), "source": "demo"}

    walker.client.post(
        f"/plans/{walker.plan_id}/verdict/?step=model", data, headers={"HX-Request": "true"}
    )

    assert walker.plan.draft["workload"]["input_tokens"] == 1024


# A pasted or uploaded config.json: what is taken to the last byte, and how a refusal helps


KIB = 1024
LIMIT = 256 * KIB
LEAVES = (
    st.none() | st.booleans() | st.integers(-(10**16), 10**16) | st.text("abcäß€😀 ", max_size=9)
)
OBJECTS = st.dictionaries(
    st.text("abc_", max_size=6), st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3))
)


def config_of(num_bytes: int, letter: str = "x") -> str:
    """A config.json that is exactly so many bytes long."""
    room = num_bytes - len('{"a": ""}')
    return f'{{"a": "{letter * (room // len(letter.encode()))}"}}'


def refusal(text: str) -> str:
    with pytest.raises(forms.ValidationError) as caught:
        parse_config(text)
    return caught.value.messages[0]


@settings(deadline=None)
@given(OBJECTS)
def test_any_object_of_ordinary_values_is_read_as_it_was_written(config):
    assert parse_config(json.dumps(config)) == config
    assert parse_config(json.dumps(config, ensure_ascii=False, indent=4)) == config


def test_a_config_is_read_up_to_its_longest_length_in_bytes():
    text = config_of(LIMIT)
    assert len(text.encode()) == LIMIT
    assert parse_config(text)["a"].startswith("x")

    sentence = refusal(config_of(LIMIT + 1))
    assert sentence.startswith("The file has 257 KiB; a config.json has at most 256 KiB")
    assert sentence.endswith("Paste config.json, not the weights' index.")

    text = config_of(LIMIT + 9 * KIB, letter="€")
    assert len(text) < LIMIT
    assert refusal(text).startswith("The file has 265 KiB; ")


def test_a_number_that_a_model_may_have_is_read_and_another_refused_by_itself():
    for number in ["9" * 18, "-" + "9" * 17, "0", "1e308", "-0.5"]:
        assert parse_config(f'{{"n": {number}}}') == {"n": json.loads(number)}, number

    for number, said in [
        ("9" * 19, "999"),
        ("1e999", "1e999"),
        ("-1e999", "-1e999"),
        ("NaN", "NaN"),
        ("Infinity", "Infinity"),
        ("-Infinity", "-Infinity"),
    ]:
        assert refusal(f'{{"n": [1, {{"m": {number}}}]}}').startswith(
            f"config.json holds the number {said}"
        ), number


def test_whatever_is_no_object_or_breaks_off_is_refused_as_such():
    for text in ["[]", '"text"', "7", "null", "true", '[{"a": 1}]']:
        assert (
            refusal(text) == "config.json is not a JSON object. Paste the whole file, from { to }."
        ), text
    assert refusal('{"a":' + "[" * 100_000).startswith("config.json is nested 100001 deep; 20 is")
    twice = refusal('{"a": {"b": 1,\n "b": 2}}')
    assert twice.startswith(
        "config.json has the key “b” twice in one object, again on line 2; keep"
    )

    for text, place in [
        ('{"a": 1,\n "b" 2}', "at line 2, column 6"),
        ('{"a": 1', "at line 1, column 8"),
        ("config", "at line 1, column 1"),
        ('{"a": 1}\n}', "at line 2, column 1"),
    ]:
        assert place in refusal(text), text


def test_a_pair_is_one_character_and_another_that_no_database_stores_is_refused():
    for text, said in [
        ("\\u0000", "holds a null character"),
        ("\\ud800", "holds half of a surrogate pair"),
        ("\ud800", "holds half of a surrogate pair"),
    ]:
        assert f"config.json: “a” {said}" in refusal(f'{{"a": ["{text}"]}}'), said
        assert f"config.json: “a key” {said}" in refusal(f'{{"{text}": 1}}'), said
    assert parse_config('{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}


def upload(data: bytes) -> dict:
    return read_upload(SimpleUploadedFile("config.json", data))


def test_an_upload_is_read_by_its_length_and_weights_are_refused_as_no_text():
    assert upload(config_of(LIMIT).encode())["a"]
    with pytest.raises(forms.ValidationError, match=r"has 2,560 KiB.*at most 256 KiB"):
        upload(config_of(10 * LIMIT).encode())
    assert read_upload(None) == {}
    assert upload(b'\xef\xbb\xbf{"a": 1}') == parse_config('\ufeff{"a": 1}') == {"a": 1}

    with pytest.raises(forms.ValidationError, match="not the weights"):
        upload(b"\x80\x02\xff safetensors")


def test_every_device_is_offered_under_its_maker_in_the_order_of_its_label():
    makers = {device.id: device.vendor or "Other" for device in devices_of_every_size()}
    for maker, group in device_choices():
        labels = [label for _, label in group]
        assert labels == sorted(labels)
        assert {makers[key] for key, _ in group} == {maker}
