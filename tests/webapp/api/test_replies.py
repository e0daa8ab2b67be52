"""Every reply of the API, with every field set, as the site sends it."""

import json
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from django.test import Client, RequestFactory
from ninja import Status
from pydantic import BaseModel, SecretStr, TypeAdapter
from typing_extensions import TypeAliasType

from runners.client.replies import hosts, jobs, team
from runners.jobspec import TrainSpec
from runners.jobspec.kinds import KINDS
from runners.shared.messages import BeatReply, ClaimReply, ClaimRequest
from tests.books.book import FOLDER
from tests.webapp.api.conftest import HostClient
from tests.webapp.conftest import client_of
from webapp.accounts.models import Role, Scope
from webapp.accounts.secrets import secret_store
from webapp.api.auth import TokenAuth
from webapp.api.urls import api
from webapp.hosts.models import HostState
from webapp.hosts.services import Contact
from webapp.jobs.models import Job, JobState

SPECS = FOLDER / "launches" / "specs.toml"
DEEPEST = 9  # models within models; some hold themselves
VALUES: dict[Any, object] = {str: "a", int: 1, float: 1.5, bool: True, object: "a", Any: "a"}
VALUES |= {SecretStr: SecretStr("hf_secret"), datetime: datetime(2026, 11, 28, tzinfo=UTC)}


def filled(kind: Any, depth: int = 0) -> Any:
    """Return a value of an annotation with all that it may hold, whatever the limits on it."""
    kind = kind.__value__ if isinstance(kind, TypeAliasType) else kind
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return inner[-1]
    if origin is dict:
        return {filled(inner[0]): filled(inner[1], depth)}
    if origin in (Annotated, Union, UnionType):
        return filled(next(each for each in inner if each is not NoneType), depth)
    if origin in (list, tuple) or (isinstance(kind, type) and issubclass(kind, Enum)):
        items = [filled(each, depth) for each in inner if each is not ...]
        return origin(items) if origin else next(iter(kind))
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        fields = kind.model_fields.items() if depth < DEEPEST else ()
        values = {name: filled(field.annotation, depth + 1) for name, field in fields}
        return kind.model_construct(**values)
    return VALUES.get(kind, kind)


def replies() -> Iterator[tuple[Any, int, type[BaseModel]]]:
    """Yield the operations, the statuses below 400 and what they reply."""
    for router in api._get_bound_routers():
        for view in router.path_operations.values():
            for operation in view.operations:
                for status, reply in operation.response_models.items():
                    kind = reply.model_fields["response"].annotation if reply else None
                    if isinstance(kind, type) and issubclass(kind, BaseModel) and status < 400:
                        yield operation, status, kind


def test_every_reply_with_every_field_set_can_be_sent():
    seen = set()
    for operation, status, kind in replies():
        request = RequestFactory().get("/")
        sent = operation._result_to_response(
            request, Status(status, filled(kind)), api.create_temporal_response(request)
        )
        document = json.loads(sent.content)
        assert document.keys() >= kind.model_fields.keys(), operation.operation_id
        seen.add(kind)
        if not any(isinstance(each, TokenAuth) for each in operation.auth_callbacks):
            assert json.loads(filled(kind).model_dump_json()) == document, operation.operation_id
    assert {ClaimReply, BeatReply} < seen


def test_the_words_of_replies_are_those_that_the_site_stores():
    for words, stored in (
        (team.Role, Role), (team.Scope, Scope), (hosts.HostState, HostState),
        (hosts.Contact, Contact), (jobs.JobState, JobState),
    ):  # fmt: skip
        assert TypeAdapter(words).json_schema()["enum"] == [each.value for each in stored], words


def test_a_spec_of_every_kind_comes_to_its_host_as_it_was_stored():
    (claim,) = (each for each, _, kind in replies() if kind is ClaimReply)
    kinds = set()
    for name, entry in tomllib.loads(SPECS.read_text("utf-8")).items():
        run = {"attempt_id": "a", "job_id": "j", "number": 1, "fence": "f", "spec": entry["spec"]}
        secrets = entry.get("secrets", {})
        reply = ClaimReply.model_validate(
            {"request": run | {"gang": entry.get("gang")}, "secrets": secrets}
        )
        request = RequestFactory().get("/")
        sent = claim._result_to_response(request, reply, api.create_temporal_response(request))
        assert ClaimReply.model_validate_json(sent.content) == reply, name
        kinds.add(reply.request.spec.kind)
    assert kinds == KINDS.keys()


@pytest.mark.django_db(databases="__all__")
def test_a_launch_with_a_secret_is_claimed_with_its_value(
    team, alice, olga, host, credential, settings, tmp_path
):
    settings.DATA_DIR = tmp_path
    secret_store(team=team, name="HF_TOKEN", value="hf_canary", by=olga)
    browser: Client = client_of(alice)
    plan = browser.get("/plans/new/?preset=demo")["Location"].split("/")[2]
    browser.post(f"/plans/{plan}/launch/", {"run": "job", "secrets": ["HF_TOKEN"]})
    attempt = Job.objects.get().current_attempt

    body = ClaimRequest(fence=attempt.fence, claim_id="folder-1", boot_id="boot-1")
    answer = HostClient(credential).post(f"/attempts/{attempt.pk}/claim", body)

    assert answer.status_code == 200, answer.content
    claimed = ClaimReply.model_validate_json(answer.content)
    assert {name: value.get_secret_value() for name, value in claimed.secrets.items()} == {
        "HF_TOKEN": "hf_canary"
    }
    assert isinstance(claimed.request.spec, TrainSpec)
    assert "hf_canary" not in repr(claimed)
