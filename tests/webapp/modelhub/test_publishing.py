"""Pushing a team's model to the Hub: the token first, a card of measured figures, a job."""

import json

import pytest
from django.test import Client

from runners.jobspec import ArtefactModel, CompressSpec, EvaluateSpec, HubData, HubModel, TrainSpec
from runners.jobspec.compress import PublishSpec
from runners.jobspec.train import LoraOptions
from tests.webapp.conftest import client_of, make_job
from webapp.accounts.secrets import secret_store
from webapp.core.clock import now
from webapp.core.problems import InvalidProblem
from webapp.jobs.models import Job
from webapp.jobs.publishing import card_of, model_publish
from webapp.modelhub.models import TeamModel, demo_config

pytestmark = pytest.mark.django_db(databases="__all__")
WRITER = {"name": "ada", "role": "write", "orgs": ["lab"]}
RESULT = {
    "measured": {"perplexity": 4.25, "perplexity_low": 4.1, "perplexity_high": 4.4},
    "notes": {"perplexity": "on 8 windows | held out"},
}


@pytest.fixture
def token(own_hub, team, alice):
    own_hub.writers["hf_write"] = WRITER
    secret_store(team=team, name="HF_TOKEN", value="hf_write", by=alice)


def ended(team, alice, host, spec, **fields) -> Job:
    job = make_job(team, alice, host, spec=spec)
    Job.objects.filter(pk=job.pk).update(state="succeeded", ended_at=now(), **fields)
    return Job.objects.get(pk=job.pk)


@pytest.fixture
def model(team, alice, host) -> TeamModel:
    """Tuned from a repository on a data set, compressed then, and evaluated."""
    spec = TrainSpec(
        model=HubModel(repository="acme/tiny", revision="a" * 40),
        data=HubData(repository="datasets/acme/chats", split="train"),
        lora=LoraOptions(),
    )
    tuned = ended(team, alice, host, spec)
    tuned.attempts.create(host=host, number=1, fence="f")
    first = tuned.attempts.get()
    maker = ended(
        team, alice, host, CompressSpec(model=ArtefactModel(attempt_id=first.pk), method="int8")
    )
    made = maker.attempts.create(host=host, number=1, fence="f")
    Job.objects.filter(pk=maker.pk).update(current_attempt=made)
    own = EvaluateSpec(model=ArtefactModel(attempt_id=made.pk))
    ended(team, alice, host, own, result=RESULT)
    return TeamModel.objects.create(
        team=team, name="Tuned | int8\n# not a heading", source="job", host=host,
        attempt_id=made.pk, artefact_name="model", facts={"job": maker.pk},
        weight_dtype="int8", config=demo_config(),
    )  # fmt: skip


def test_a_push_is_a_job_on_the_models_host_with_the_token_and_a_card(model, alice, token):
    job = model_publish(model=model, repository="lab/tuned", by=alice)
    spec = PublishSpec.model_validate(job.spec)
    assert (job.requested_host, spec.secrets, spec.is_private) == (model.host, ("HF_TOKEN",), True)
    assert spec.model == ArtefactModel(attempt_id=model.attempt_id, name="model")
    assert spec.card.startswith("---\nlibrary_name: transformers\nbase_model: acme/tiny\n")
    assert "datasets:\n- acme/chats\ntags:\n- slipway\n- lora\n- int8\n---" in spec.card
    assert "Made from acme/tiny by lora, then int8 on acme/chats, with Slipway." in spec.card
    assert "\n# Tuned int8 # not a heading\n" in spec.card
    (row,) = [line for line in spec.card.splitlines() if "4.25" in line]
    evaluation = Job.objects.get(kind="evaluate")
    assert row.count("|") == 4, row
    assert f"Evaluate on Box, {evaluation.ended_at:%Y-%m-%d}, job {evaluation.pk}" in row
    assert "hf_write" not in json.dumps(job.spec)


def test_the_card_has_no_figure_of_another_model_and_none_of_a_deleted_job(
    model, team, alice, host
):
    other = EvaluateSpec(model=ArtefactModel(attempt_id=model.attempt_id, name="adapter"))
    same = EvaluateSpec(model=ArtefactModel(attempt_id=model.attempt_id))
    figures = {"measured": {"perplexity": 9.75}, "notes": {}}
    ended(team, alice, host, other, result=figures)
    ended(team, alice, host, same, result=figures, deleted_at=now())
    maker = Job.objects.get(pk=model.facts["job"])
    card = card_of(model, maker)
    assert "4.25" in card
    assert "9.75" not in card


def test_a_teams_own_files_are_not_named_in_the_card(model):
    tuned = Job.objects.get(kind="train")
    tuned.spec |= {"data": {"source": "upload", "dataset_id": "x", "name": "salaries.csv"}}
    assert "salaries" not in card_of(model, tuned)


@pytest.mark.parametrize(
    ("repository", "writer", "words"),
    [
        ("lab/tuned", None, "store one that may write as the team's secret HF_TOKEN"),
        ("lab/tuned", {**WRITER, "role": "read"}, "may only read"),
        ("other/tuned", WRITER, "does not belong to other: push to ada/… or to one of lab"),
        ("tuned", WRITER, "tuned"),
        ("lab/tuned:Q4_K_M", WRITER, "name the repository alone"),
        ("ms://lab/tuned", WRITER, "to the Hugging Face Hub alone"),
    ],
)
def test_what_cannot_be_pushed_is_refused_before_a_job(
    model, alice, team, own_hub, repository, writer, words
):
    if writer is not None:
        own_hub.writers["hf_write"] = writer
        secret_store(team=team, name="HF_TOKEN", value="hf_write", by=alice)
    with pytest.raises(InvalidProblem, match=words):
        model_publish(model=model, repository=repository, by=alice)
    assert not Job.objects.filter(kind="publish").exists()


def test_where_the_site_does_not_reach_the_hub_the_host_checks_the_token(
    model, alice, token, monkeypatch
):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert model_publish(model=model, repository="other/tuned", by=alice).kind == "publish"


def test_the_page_and_the_api_push_and_viewers_may_not(model, alice, vera, charlie, token):
    path, posted = (
        f"/models/{model.pk}/publish/",
        {"repository": "lab/tuned", "visibility": "public"},
    )
    assert "Push to the Hub" in client_of(alice).get(f"/models/{model.pk}/").content.decode()
    assert path not in client_of(vera).get(f"/models/{model.pk}/").content.decode()
    assert client_of(vera).post(path, posted).status_code == 403
    assert client_of(charlie).post(path, posted).status_code == 404
    client: Client = client_of(alice)
    page = client.post(path, posted, follow=True).content.decode()
    assert "Push Tuned" in page
    assert Job.objects.get(kind="publish").spec["is_private"] is False
    body = {"repository": "lab/tuned", "revision": "v1"}
    answer = client.post(f"/api/v1/publications/{model.pk}", body, "application/json")
    assert answer.status_code == 201, answer.json()
    assert answer.json()["spec"]["revision"] == "v1"
    page = client.post(path, {"repository": "other/x"}, follow=True).content.decode()
    assert "does not belong to other" in page
