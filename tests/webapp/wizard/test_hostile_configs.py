"""A config.json that is meant to break its reader: refused in words, and soon."""

import json

import pytest

from tests.webapp.conftest import client_of
from webapp.wizard.drafts import draft_begin

pytestmark = pytest.mark.django_db(databases="__all__")

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}
HOSTILE = {
    "deep lists": "[" * 100_000,
    "deep objects": '{"a":' * 20_000 + "1" + "}" * 20_000,
    "deep inside": json.dumps(LLAMA)[:-1] + ', "x": ' + "[" * 5000 + "]" * 5000 + "}",
    "long": '{"a": "' + "x" * 300_000 + '"}',
    "no end": '{"a": "',
    "many digits": json.dumps(LLAMA).replace("64", "9" * 5000),
    "many layers": json.dumps(LLAMA | {"num_hidden_layers": 10**12}),
    "wide": json.dumps(LLAMA | {"hidden_size": 10**15}),
    "many experts": json.dumps(LLAMA | {"model_type": "mixtral", "num_local_experts": 10**12}),
    "negative": json.dumps(LLAMA | {"vocab_size": -1}),
    "infinite": json.dumps(LLAMA).replace("512", "1e999"),
    "no object": "[1, 2]",
}


def post(user, plan, text: str):
    """Send the model step with a pasted config."""
    sent = {"source": "config", "config": text, "catalog_id": "meta-llama/Llama-3.1-8B"}
    return client_of(user).post(f"/plans/{plan.pk}/edit/model/", sent)


@pytest.fixture
def plan(team, alice):
    return draft_begin(team=team, owner=alice, preset="serve", model=None)


def test_the_sane_one_among_them_is_taken(plan, alice):
    answer = post(alice, plan, json.dumps(LLAMA))

    assert answer.status_code == 302


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_config_is_refused_in_words(plan, alice, text):
    answer = post(alice, plan, text)

    assert answer.status_code == 422
    assert b"Traceback" not in answer.content
