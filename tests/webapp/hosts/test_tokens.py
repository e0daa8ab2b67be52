"""Enrolment tokens: once, for an hour, and never stored in plain text."""

import pytest

from webapp.hosts.models import EnrolmentToken
from webapp.hosts.services import digest, token_create, token_revoke

pytestmark = pytest.mark.django_db


def test_only_the_digest_is_stored(team, olga):
    token, text = token_create(team=team, by=olga, name="Box")
    assert token.token_hash == digest(text)
    assert text not in str(EnrolmentToken.objects.values().get())


def test_a_token_lives_an_hour(team, olga):
    token, _ = token_create(team=team, by=olga, name="Box")
    assert (token.expires_at - token.created_at).total_seconds() == pytest.approx(3600, abs=5)


def test_a_revoked_token_cannot_be_revoked_again(team, olga):
    token, _ = token_create(team=team, by=olga, name="Box")
    assert [token_revoke(token=token), token_revoke(token=token)] == [True, False]
