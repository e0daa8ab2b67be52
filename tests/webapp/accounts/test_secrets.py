"""A team's secrets, and the secrets of sessions, are stored so that no reader finds them."""

import base64
import json
import re
import stat
from io import StringIO
from pathlib import Path

import pytest
from cryptography.fernet import Fernet
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from django.contrib.sessions.models import Session
from django.core.management import CommandError, call_command
from django.db import connections

from runners.jobspec import TrainSpec
from tests.webapp.conftest import claim, client_of, make_job
from webapp.accounts.models import Secret
from webapp.accounts.secrets import secret_delete, secret_store, secrets_open, secrets_reseal
from webapp.agents.dispatch import attempt_secrets
from webapp.audit.models import Event
from webapp.core import vault
from webapp.core.problems import InvalidProblem
from webapp.core.vault import VaultError
from webapp.hosts.models import EnrolmentToken
from webapp.jobs.models import Job
from webapp.jobs.services import job_submit

# A team's secrets: sealed at rest with keys from elsewhere, opened for a claim alone.


pytestmark = pytest.mark.django_db(databases="__all__")

CANARY = "hf_canary_Zq7Lw3Ne"


@pytest.fixture(autouse=True)
def _own_keys(settings, tmp_path, monkeypatch):
    """Keep the keys in a folder of the test's own."""
    monkeypatch.delenv(vault.VARIABLE, raising=False)
    settings.DATA_DIR = tmp_path


@pytest.fixture
def secret(team, olga) -> Secret:
    return secret_store(team=team, name="HF_TOKEN", value=CANARY, by=olga)


def test_what_is_stored_opens_to_its_team_alone_and_its_row_holds_no_part_of_it(
    secret, team, tmp_path, other_team, olga
):
    assert secrets_open(team_id=team.pk, names=["HF_TOKEN"]) == {"HF_TOKEN": CANARY}
    assert CANARY not in secret.sealed
    assert all(CANARY[at : at + 6] not in secret.sealed for at in range(len(CANARY) - 6))
    file = tmp_path / vault.FILE_NAME
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert Fernet(file.read_text().strip())
    assert secrets_open(team_id=other_team.pk, names=["HF_TOKEN"]) == {}
    secret_store(team=team, name="HF_TOKEN", value="another-value", by=olga)
    assert secrets_open(team_id=team.pk, names=["HF_TOKEN"]) == {"HF_TOKEN": "another-value"}


def test_without_its_key_a_secret_does_not_open(secret, team, tmp_path):
    (tmp_path / vault.FILE_NAME).write_text(Fernet.generate_key().decode())
    with pytest.raises(VaultError, match="Restore the key that encrypted it"):
        secrets_open(team_id=team.pk, names=["HF_TOKEN"])


def test_a_row_copied_to_another_team_does_not_open(secret, other_team, olga):
    Secret.objects.create(
        team=other_team, name="HF_TOKEN", sealed=secret.sealed, changed_at=secret.changed_at
    )
    with pytest.raises(VaultError, match="encrypted for another secret or team"):
        secrets_open(team_id=other_team.pk, names=["HF_TOKEN"])


def test_a_name_or_value_that_is_none_is_refused_without_being_said(team, olga):
    for name in ["hf_token", "1A", "A-B", "A B", "A" * 41, "../A", "LD\nX", ""]:
        with pytest.raises(InvalidProblem, match="is not a valid secret name"):
            secret_store(team=team, name=name, value=CANARY, by=olga)
    for value in ["qwrt", "x" * 16_385, "hf_\0canary"]:
        with pytest.raises(InvalidProblem) as refusal:
            secret_store(team=team, name="HF_TOKEN", value=value, by=olga)
        assert value not in refusal.value.detail, value


def test_a_pasted_key_keeps_its_lines_and_a_token_has_none(team, olga):
    key = "-----BEGIN KEY-----\r\nMIIEvQIBADANBgkq\r\n\r\n-----END KEY-----\r\n"
    for value, stored, said in [
        (key, key.replace("\r\n", "\n"), " with its 4 lines"),
        (key.replace("\r\n", "\r"), key.replace("\r\n", "\n"), " with its 4 lines"),
        (f"{CANARY}\r\n", CANARY, ""),
        (f" {CANARY} ", f" {CANARY} ", ""),
    ]:
        page = client_of(olga).post(
            "/settings/secrets/save/", {"name": "DEPLOY_KEY", "value": value}, follow=True
        )
        assert secrets_open(team_id=team.pk, names=["DEPLOY_KEY"]) == {"DEPLOY_KEY": stored}
        assert f"DEPLOY_KEY is stored{said}." in page.content.decode()
    html = page.content.decode()
    assert '<textarea class="input concealed" id="secret-value" name="value"' in html


# Rotation


def test_rotating_seals_anew_and_drops_the_old_key(secret, team, tmp_path):
    before, old = secret.sealed, (tmp_path / vault.FILE_NAME).read_text()
    call_command("rotate_secrets", stdout=StringIO())
    secret.refresh_from_db()
    assert secret.sealed != before
    assert (tmp_path / vault.FILE_NAME).read_text().split() != old.split()
    assert len((tmp_path / vault.FILE_NAME).read_text().split()) == 1
    assert secrets_open(team_id=team.pk, names=["HF_TOKEN"]) == {"HF_TOKEN": CANARY}


def test_a_rotation_that_fails_keeps_every_key(secret, tmp_path):
    Secret.objects.update(sealed="damaged")
    old = (tmp_path / vault.FILE_NAME).read_text().split()
    with pytest.raises(CommandError):
        call_command("rotate_secrets", stdout=StringIO())
    assert set(old) < set((tmp_path / vault.FILE_NAME).read_text().split())


def test_keys_from_the_environment_are_rotated_by_their_order(secret, team, monkeypatch):
    old, new = vault.keys()[0], Fernet.generate_key().decode()
    monkeypatch.setenv(vault.VARIABLE, f"{new},{old}")
    assert secrets_reseal() == 1
    monkeypatch.setenv(vault.VARIABLE, new)
    assert secrets_open(team_id=team.pk, names=["HF_TOKEN"]) == {"HF_TOKEN": CANARY}


def test_a_key_that_is_none_is_said_to_be(monkeypatch):
    monkeypatch.setenv(vault.VARIABLE, "no-key")
    with pytest.raises(VaultError, match="Create a key with"):
        vault.seal("text", owner="a test")


# The cipher


def test_a_sealed_text_is_aes_256_gcm_of_its_owner_and_refused_when_changed():
    sealed = vault.seal("Grüße", owner="team a")
    stored = base64.urlsafe_b64decode(sealed.removeprefix("v2:"))
    master = base64.urlsafe_b64decode(vault.keys()[0])
    key = HKDF(SHA256(), 32, salt=None, info=b"slipway vault AES-256-GCM").derive(master)
    assert AESGCM(key).decrypt(stored[:12], stored[12:], b"team a") == "Grüße".encode()
    assert len(stored) == 12 + len("Grüße".encode()) + 16
    again = base64.urlsafe_b64decode(vault.seal("Grüße", owner="team a").removeprefix("v2:"))
    assert again[:12] != stored[:12]
    flipped = [bytes(b ^ (at == n) for n, b in enumerate(stored)) for at in range(len(stored))]
    for changed in [*flipped, stored[:-1], stored[:9], b""]:
        with pytest.raises(VaultError, match="No key decrypts"):
            vault.unseal("v2:" + base64.urlsafe_b64encode(changed).decode(), owner="team a")
    for text, owner in [(sealed, "team b"), (sealed[3:], "team a"), ("v2:é", "team a"), ("é", "")]:
        with pytest.raises(VaultError, match="No key decrypts"):
            vault.unseal(text, owner=owner)
    assert vault.unseal(sealed, owner="team a") == "Grüße"


def test_what_an_older_version_sealed_opens_and_rotation_replaces_it(secret, team, other_team):
    document = json.dumps({"team": team.pk, "name": "HF_TOKEN", "value": CANARY})
    token = Fernet(vault.keys()[0]).encrypt(document.encode()).decode()
    Secret.objects.update(sealed=token)
    assert secrets_open(team_id=team.pk, names=["HF_TOKEN"]) == {"HF_TOKEN": CANARY}
    Secret.objects.update(team=other_team)
    with pytest.raises(VaultError, match="encrypted for another secret or team"):
        secrets_open(team_id=other_team.pk, names=["HF_TOKEN"])
    Secret.objects.update(team=team)
    call_command("rotate_secrets", stdout=StringIO())
    secret.refresh_from_db()
    assert secret.sealed.startswith("v2:")
    assert secrets_open(team_id=team.pk, names=["HF_TOKEN"]) == {"HF_TOKEN": CANARY}


# Jobs


@pytest.fixture
def promised(team, alice, host, secret) -> Job:
    """A submitted job that names the secret."""
    spec = TrainSpec(secrets=("HF_TOKEN",))
    return job_submit(job=make_job(team, alice, host, spec=spec), by="alice")


def test_a_claim_brings_the_value_again_and_leaves_one_note(promised):
    given = attempt_secrets(claim(promised.current_attempt))
    assert given["HF_TOKEN"].get_secret_value() == CANARY
    event = Event.objects.get(kind="job.secrets")
    assert (event.subject, event.detail) == (promised.pk, {"names": ["HF_TOKEN"]})
    assert Secret.objects.get().last_given_at is not None
    first = attempt_secrets(claim(promised.current_attempt))
    again = attempt_secrets(claim(promised.current_attempt))
    assert again == first
    assert Event.objects.filter(kind="job.secrets").count() == 1


def test_a_job_that_names_none_is_given_none(job, secret):
    assert attempt_secrets(claim(job.current_attempt)) == {}


def test_a_secret_that_is_gone_at_the_claim_is_left_out(promised, secret):
    secret_delete(secret=secret)
    assert attempt_secrets(claim(promised.current_attempt)) == {}


def test_a_job_that_names_what_the_team_has_not_is_refused(team, alice, host):
    with pytest.raises(InvalidProblem, match="has no secret HF_TOKEN"):
        make_job(team, alice, host, spec=TrainSpec(secrets=("HF_TOKEN",)))


def test_another_teams_job_cannot_name_it(secret, other_team, charlie, host):
    with pytest.raises(InvalidProblem, match="has no secret HF_TOKEN"):
        make_job(other_team, charlie, host, spec=TrainSpec(secrets=("HF_TOKEN",)))


# The canary: nowhere but in the claim's answer

TABS = ("", "metrics/", "logs/", "events/", "config/", "artefacts/", "post-mortem/")


def test_no_page_dump_or_file_of_the_database_holds_it(promised, olga, django_db_blocker):
    claim(promised.current_attempt)
    client = client_of(olga)
    pages = [f"/jobs/{promised.pk}/{tab}" for tab in TABS] + ["/settings/secrets/", "/jobs/", "/"]
    texts = [client.get(address).content.decode() for address in pages]
    assert not [text for text in texts if CANARY in text]
    assert "HF_TOKEN" in texts[4]  # the reference stands in the config
    attempt_secrets(claim(promised.current_attempt))
    dump = StringIO()
    call_command("dumpdata", "--exclude", "contenttypes", stdout=dump)
    assert "HF_TOKEN" in dump.getvalue()
    assert CANARY not in dump.getvalue()
    attempt_secrets(claim(promised.current_attempt))
    names = [connections[alias].settings_dict["NAME"] for alias in connections]
    files = [path for name in names for path in Path(name).parent.glob(f"{Path(name).name}*")]
    assert not [path for path in files if CANARY.encode() in path.read_bytes()]


def test_no_log_holds_it(promised, team, olga, capfd, caplog):
    client = client_of(olga)
    client.post("/settings/secrets/save/", {"name": "OTHER", "value": CANARY})
    client.post("/settings/secrets/save/", {"name": "no name", "value": CANARY})
    attempt_secrets(claim(promised.current_attempt))
    out, err = capfd.readouterr()
    assert CANARY not in out + err + caplog.text


# The page


def test_an_operator_stores_one_and_never_sees_it_again(team, olga):
    client = client_of(olga)
    answer = client.post(
        "/settings/secrets/save/", {"name": "HF_TOKEN", "value": CANARY}, follow=True
    )
    text = answer.content.decode()
    assert "HF_TOKEN is stored" in text
    assert CANARY not in text
    assert secrets_open(team_id=team.pk, names=["HF_TOKEN"]) == {"HF_TOKEN": CANARY}
    answer = client_of(olga).post(
        "/settings/secrets/save/", {"name": "hf token", "value": CANARY}, follow=True
    )
    text = answer.content.decode()
    assert "is not a valid secret name" in text
    assert CANARY not in text


def test_a_practitioner_sees_names_and_an_operator_forgets_one(secret, alice, olga):
    client = client_of(alice)
    assert b"HF_TOKEN" in client.get("/settings/secrets/").content
    assert (
        client.post("/settings/secrets/save/", {"name": "A_B", "value": CANARY}).status_code == 403
    )
    assert client.post(f"/settings/secrets/{secret.pk}/delete/").status_code == 403
    client_of(olga).post(f"/settings/secrets/{secret.pk}/delete/")
    assert not Secret.objects.exists()


def test_keys_that_cannot_be_read_are_told_on_the_page(olga, monkeypatch):
    def fail():
        raise VaultError("The keys cannot be read: Permission denied.")

    monkeypatch.setattr(vault, "keys", fail)
    body = {"name": "HF_TOKEN", "value": CANARY}
    page = client_of(olga).post("/settings/secrets/save/", body, follow=True)

    assert "The keys cannot be read: Permission denied." in page.content.decode()


def test_a_file_of_keys_of_somebody_else_is_named(secret, monkeypatch):
    def fail(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", fail)
    with pytest.raises(VaultError, match=r"secrets\.keys cannot be read: Permission denied"):
        vault.keys()


# What a session keeps for a page to come: nothing that reads as a secret in the database.


def sessions() -> str:
    """Return what every session of the database holds, decoded."""
    return str([row.get_decoded() for row in Session.objects.all()])


def token_shown(client) -> str:
    """Make an enrolment token and return it as the page shows it."""
    page = client.post("/hosts/add/", {"name": "box", "pool": "default"}, follow=True)
    found = re.search(r"slt_[\w-]+", page.content.decode())
    assert found is not None
    return found[0]


def test_no_session_holds_an_enrolment_token(olga):
    client = client_of(olga)
    token = token_shown(client)
    assert token not in sessions()
    assert "slt_" not in sessions()
    assert token not in str(EnrolmentToken.objects.values())
    assert EnrolmentToken.objects.get().pk in sessions()  # it is kept, and sealed


def test_a_token_whose_key_is_gone_is_not_shown_and_breaks_nothing(olga, monkeypatch):
    client = client_of(olga)
    token_shown(client)
    monkeypatch.setenv(vault.VARIABLE, Fernet.generate_key().decode())
    page = client.get(f"/hosts/add/{EnrolmentToken.objects.get().pk}/")
    assert page.status_code == 200
    assert "slt_" not in page.content.decode()
