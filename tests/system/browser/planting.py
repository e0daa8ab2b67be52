"""Fills every text that somebody else may choose with what would act if a page let it in.

Runs inside the product's own environment (``manage.py shell``); what is planted is found from the
models, so that a new column is planted without a line here.
"""

import json
import sys
from typing import Any

from django.apps import apps
from django.contrib.auth.models import User
from django.db import models, transaction

from tests.stack import PASSWORD
from webapp.accounts.models import Membership, Team
from webapp.accounts.secrets import secret_store
from webapp.accounts.sign_in import link_path
from webapp.audit.models import Event
from webapp.core.clock import now
from webapp.datasets.models import Dataset
from webapp.hosts.machines import virtual_host_create
from webapp.hosts.models import Host
from webapp.hosts.services import token_create
from webapp.jobs.models import Artefact, AttemptEvent, Job
from webapp.modelhub.models import TeamModel, demo_config
from webapp.plans.models import Plan

MARK = "pLaNtEd"
TEXTS = (
    f"<script>hacked='{MARK}'</script>",
    f'"><img src=x onerror=hacked=1>{MARK}',
    f"{MARK}</script></title><svg/onload=hacked=1>",
    f"javascript:hacked='{MARK}'",
    f"{{{{'zq'|add:'qz'}}}}{{% debug %}}{MARK}",
    f"=HYPERLINK('javascript:1')'onmouseover='hacked=1'{MARK}",
    f"<b style=color:red onclick=hacked=1>{MARK}</b>\x1b[31m\u202e",
)
# Codes, keys, digests and addresses that the product makes itself, or checks where they come in.
OWN = {
    *("slug", "contact", "kind", "team_id", "attempt_id", "subject", "fence", "boot_id"),
    *("session_key", "account", "address", "sealed", "claim_id", "idempotency_key", "digest"),
    *("metric", "source", "unit", "weight_dtype", "pool", "uuid", "detail", "state", "path"),
    *("reason", "stop_reason"),  # of a closed list, checked where a host reports it
    *("artefact_name", "series"),
    *("token_hash", "credential_hash", "command_salt", "redis_secret_hash", "command_secret"),
}
FREE_KEYS = {
    *("hostname", "os", "kernel", "architecture", "cpu_model", "python_version", "agent_version"),
    *("driver_version", "driver_problem", "torch_version", "text", "message", "detail", "error"),
    *("filesystem", "cause", "remedy", "title", "name", "line"),
}
LEFT = {
    *("audit.Event", "audit.Link"),  # the database refuses to change these
    *("metrics.MetricBatch", "metrics.MetricSource", "metrics.MetricChunk"),  # points
    "jobs.Artefact",  # a name that is no folder's is refused where it is announced
}


def hostile(number: int, longest: int | None) -> str:
    """Return a text of at most ``longest`` characters: several that act, or one that fits."""
    turned = TEXTS[number % len(TEXTS) :] + TEXTS[: number % len(TEXTS)]
    if longest is None:
        return " ".join(turned)
    fitting = [text for text in turned if len(text) < longest - 6]
    if not fitting:
        return "<i onclick=hacked=1>"[:longest]
    return f"{number} {fitting[0]}"


def text_columns(model: type[models.Model]) -> list[models.Field[Any, Any]]:
    """Return the columns of a model that hold what somebody typed or a host said."""
    return [
        field
        for field in model._meta.concrete_fields
        if isinstance(field, models.CharField | models.TextField)
        and not (field.primary_key or field.choices or field.name in OWN)
    ]


def planted(value: Any, number: int) -> Any:
    """Return a document whose free texts are hostile and whose structure is the same."""
    if isinstance(value, dict):
        return {
            key: hostile(number, None)
            if key in FREE_KEYS and isinstance(item, str)
            else planted(item, number)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [planted(item, number) for item in value]
    return value


def plant_columns() -> dict[str, list[str]]:
    """Fill the text columns of every row of the product; return what was filled."""
    filled: dict[str, list[str]] = {}
    for model in apps.get_models():
        label = model._meta.label
        names = [field.name for field in text_columns(model)]
        if not model.__module__.startswith("webapp.") or label in LEFT or not names:
            continue
        filled[label] = names
        for number, row in enumerate(model._default_manager.all()):
            for field in text_columns(model):
                text = hostile(number, getattr(field, "max_length", None))
                model._default_manager.filter(pk=row.pk).update(**{field.name: text})
    return filled


def plant_documents() -> None:
    """Fill what hosts reported: facts, checks, log lines, the history's details."""
    for number, host in enumerate(Host.objects.all()):
        documents = {name: planted(getattr(host, name), number) for name in ("facts", "checks")}
        labels = {hostile(number, 60): hostile(number + 1, 60)}
        Host.objects.filter(pk=host.pk).update(labels=labels, **documents)
    for number, line in enumerate(AttemptEvent.objects.filter(kind__in=("log", "phase"))):
        AttemptEvent.objects.filter(pk=line.pk).update(body=planted(line.body, number))
    for number, artefact in enumerate(Artefact.objects.all()):
        Artefact.objects.filter(pk=artefact.pk).update(facts=planted(artefact.facts, number))


def make_things(team: Team, owner: User) -> None:
    """Make one of each thing that a finished demo does not leave."""
    secret_store(team=team, name="HF_TOKEN", value="hf_abcdefgh", by=owner)
    token_create(team=team, by=owner, name="Next")
    virtual_host_create(
        team=team, name="Later", device="rtx-4090", num_devices=2, memory_bytes=None, by="olga"
    )
    TeamModel.objects.create(team=team, name="Own", source="config", config=demo_config())
    Dataset.objects.create(
        team=team,
        name="own.jsonl",
        sha256="0" * 64,
        size_bytes=2,
        num_records=2,
        format="text",
        samples=[[["text", hostile(0, None)]], [[hostile(1, None), hostile(2, None)]]],
    )


def history(team: Team, subject: str) -> None:
    """Write events whose every text is hostile, for a job and for the administration."""
    for number in range(len(TEXTS)):
        Event.objects.create(
            at=now(),
            team_id=(team.pk, "")[number % 2],
            kind=hostile(number, 40),
            subject=subject,
            from_state=hostile(number, 24),
            to_state=hostile(number, 24),
            reason=hostile(number, 40),
            actor=hostile(number, 80),
            detail={hostile(number, None): hostile(number + 1, None)},
        )


def hostile_person(team: Team) -> None:
    """Make an owner of things whose name is hostile, an admin and a superuser."""
    named = User.objects.create(username=hostile(1, 120), first_name=hostile(0, 100))
    Membership.objects.create(user=named, team=team, role="practitioner")
    Plan.objects.update(owner=named)
    Job.objects.update(owner=named)
    for name, role in (("adam", "admin"), ("root", "admin")):
        user = User.objects.create(username=name, is_staff=name == "root")
        user.is_superuser = name == "root"
        user.set_password(PASSWORD)
        user.save()
        Membership.objects.create(user=user, team=team, role=role)


def arguments() -> dict[str, str]:
    """Return something that exists for every argument of an address."""
    job = Job.objects.filter(state="succeeded").latest("created_at")
    attempt = job.current_attempt
    assert attempt is not None
    team = job.team
    host = attempt.host
    *_, uid, token, _end = link_path(User.objects.get(username="olga")).split("/")
    return {
        "<slug:uid>": uid,
        "<slug:token>": token,
        "<slug:form>": "json",
        "<slug:job_id>": job.pk,
        "<job_id>": job.pk,
        "<str:plan_id>": Plan.objects.filter(team=team).latest("created_at").pk,
        "<plan_id>": Plan.objects.filter(team=team).latest("created_at").pk,
        "<key>": "torchrun",
        "<slug:key>": "torchrun",
        "<question>": "longest_sequence",
        "<slug:slug>": host.slug,
        "<slug:token_id>": team_token(team),
        "<slug:pool_id>": host.pool_id,
        "<path:model_id>": TeamModel.objects.filter(source="config").latest("pk").pk,
        "<str:key>": "int8_dynamic",
        "<path:page>": "hosts",
        "<slug:tab>": "summary",
        "<slug:step>": "goal",
    }


def team_token(team: Team) -> str:
    """Return the newest token of a team."""
    model = apps.get_model("hosts", "EnrolmentToken")
    return str(model.objects.filter(team=team).latest("created_at").pk)


@transaction.atomic
def plant() -> None:
    """Plant everything, and print what was planted and where things lie, as JSON."""
    team = Team.objects.earliest("created_at")
    owner = User.objects.get(username="alice")
    make_things(team, owner)
    where = arguments()
    filled = plant_columns()
    plant_documents()
    history(team, where["<job_id>"])
    hostile_person(team)
    json.dump({"arguments": where, "filled": filled}, sys.stdout)
