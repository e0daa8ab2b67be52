"""A pasted or uploaded config.json: what is taken to the last byte, and how a refusal helps."""

import json

import pytest
from django import forms
from django.core.files.uploadedfile import SimpleUploadedFile
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.catalog.devices import list_devices
from webapp.wizard.forms import device_choices, parse_config, read_upload

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


def test_a_config_of_the_longest_length_is_read():
    text = config_of(LIMIT)

    assert len(text.encode()) == LIMIT
    assert parse_config(text)["a"].startswith("x")


def test_a_config_one_byte_too_long_is_refused_with_the_limit_and_the_way_out():
    sentence = refusal(config_of(LIMIT + 1))

    assert sentence.startswith("This is 257 KiB long; a config.json has at most 256 KiB")
    assert sentence.endswith("Paste config.json, not the weights' index.")


def test_the_length_is_counted_in_bytes_and_not_in_letters():
    text = config_of(LIMIT + 9 * KIB, letter="€")

    assert len(text) < LIMIT
    assert refusal(text).startswith("This is 265 KiB long; ")


@pytest.mark.parametrize("number", ["9" * 18, "-" + "9" * 17, "0", "1e308", "-0.5"])
def test_a_number_that_a_model_may_have_is_read(number):
    assert parse_config(f'{{"n": {number}}}') == {"n": json.loads(number)}


@pytest.mark.parametrize(
    ("number", "said"),
    [
        ("9" * 19, "999"),
        ("1e999", "1e999"),
        ("-1e999", "-1e999"),
        ("NaN", "NaN"),
        ("Infinity", "Infinity"),
        ("-Infinity", "-Infinity"),
    ],
)
def test_a_number_that_no_model_has_is_refused_by_itself(number, said):
    assert refusal(f'{{"n": [1, {{"m": {number}}}]}}').startswith(f"It holds {said}")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"a": 1,\n "b" 2}', "at line 2, column 6"),
        ('{"a": 1', "at line 1, column 8"),
        ("config", "at line 1, column 1"),
        ('{"a": 1}\n}', "at line 2, column 1"),
    ],
)
def test_a_text_that_breaks_off_is_refused_with_the_place(text, place):
    assert place in refusal(text)


def test_a_text_nested_without_end_is_refused_as_no_json():
    assert "This is not JSON" in refusal('{"a":' + "[" * 100_000)


@pytest.mark.parametrize("text", ["[]", '"text"', "7", "null", "true", '[{"a": 1}]'])
def test_whatever_is_no_object_is_refused_as_such(text):
    assert refusal(text) == "A config.json is one object in braces, this is not."


@pytest.mark.parametrize("text", ["\\u0000", "\\ud800", "\\udfff"])
def test_a_character_that_no_database_stores_is_refused(text):
    assert "a character that no text has" in refusal(f'{{"a": ["{text}"]}}')
    assert "a character that no text has" in refusal(f'{{"{text}": 1}}')


def test_a_whole_pair_is_one_character_and_is_read():
    assert parse_config('{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}


def upload(data: bytes) -> dict:
    return read_upload(SimpleUploadedFile("config.json", data))


def test_no_upload_reads_as_nothing():
    assert read_upload(None) == {}


def test_an_upload_of_the_longest_length_is_read_and_a_longer_one_refused():
    assert upload(config_of(LIMIT).encode())["a"]

    with pytest.raises(forms.ValidationError, match=r"2,560 KiB long.*at most 256 KiB"):
        upload(config_of(10 * LIMIT).encode())


def test_weights_are_refused_as_no_text():
    with pytest.raises(forms.ValidationError, match="not the weights"):
        upload(b"\x80\x02\xff safetensors")


def test_every_device_is_offered_under_its_maker_in_the_order_of_its_label():
    makers = {device.id: device.vendor or "Other" for device in list_devices()}

    for maker, group in device_choices():
        labels = [label for _, label in group]
        assert labels == sorted(labels)
        assert {makers[key] for key, _ in group} == {maker}
