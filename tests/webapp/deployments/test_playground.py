"""The playground of a deployment: its page, and the key with which its script asks the gateway."""

import pytest

from runners.jobspec.serve import key_hash
from tests.webapp.conftest import client_of
from tests.webapp.deployments.test_deployments import answer, make, plan, small  # noqa: F401
from tests.webapp.plans.conftest import demo_plan, serve_plan, trained  # noqa: F401
from webapp.deployments.keys import KeyOptions, key_make, key_revoke
from webapp.deployments.models import ServingKey
from webapp.deployments.services import deployment_wake
from webapp.gateway.cards import cards_of
from webapp.gateway.routes import load_snapshot

pytestmark = pytest.mark.django_db(databases="__all__")


def test_a_persons_key_is_told_again_while_it_is_valid_and_is_in_no_page(
    small, team, alice, olga  # noqa: F811
):  # fmt: skip
    url = f"/deployments/{small.pk}/playground/"
    key_make(team=team, by=alice, options=KeyOptions(name="Playground"))  # of another origin
    told = client_of(alice).post(f"{url}key/").content.decode()
    assert client_of(alice).post(f"{url}key/").content.decode() == told
    assert client_of(olga).post(f"{url}key/").content.decode() != told
    page = client_of(alice).get(url).content.decode()
    assert told not in page
    assert "data-conversation" in page
    key = ServingKey.objects.get(digest=key_hash(told))
    assert (key.owner, key.hint) == (alice, told[: len(key.hint)])
    assert load_snapshot({}).keys[key_hash(told)].opens(small.name)
    key_revoke(key=key, by=alice)
    new = client_of(alice).post(f"{url}key/").content.decode()
    assert new != told
    assert client_of(alice).get(f"{url}key/").status_code == 405


def test_the_page_knows_whether_a_loaded_model_has_a_chat_template(team, alice, plan):  # noqa: F811
    for name, said, kept in (("plain", False, "no"), ("chats", True, "yes"), ("old", None, "")):
        row = make(team, alice, plan, name=name)
        answer(deployment_wake(row), has_chat_template=said)
        page = client_of(alice).get(f"/deployments/{row.pk}/playground/").content.decode()
        assert f'data-chat-template="{kept}"' in page
        (card,) = cards_of(load_snapshot({}).routes[team.pk, name], {})
        assert card.get("has_chat_template") is said
