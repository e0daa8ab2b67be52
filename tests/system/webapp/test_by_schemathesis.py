"""The API under requests that schemathesis makes of its own document, valid and broken.

Every operation is called by a host, by a person and by nobody. No answer is a fault of the
server, and every status is one that the document names.
"""

from urllib.parse import urlsplit

import pytest
import requests
import schemathesis
from django.db import transaction
from django.test import Client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.core.errors import InvalidSchema
from schemathesis.generation import GenerationMode

from tests.webapp.api.test_agents_api import knock
from tests.webapp.conftest import client_of
from webapp.api import agents
from webapp.api.urls import api
from webapp.core.pace import calls
from webapp.hosts.services import token_create

pytestmark = [pytest.mark.django_db(databases="__all__"), pytest.mark.slow]
SCHEMA = schemathesis.openapi.from_dict(api.get_openapi_schema())
OPERATIONS = {
    f"{found.ok().method.upper()} {found.ok().path}": found.ok()
    for found in SCHEMA.get_all_operations()
}
CALLERS = ("host", "person", "nobody")
PROPERTY = settings(
    max_examples=20,
    suppress_health_check=list(HealthCheck),
    deadline=None,
)


@pytest.fixture
def callers(alice, credential) -> dict[str, Client]:
    """A client of each kind."""
    host = Client(headers={"Authorization": f"Bearer {credential}"})
    return {"host": host, "person": client_of(alice), "nobody": Client()}


@pytest.fixture
def body_known(team, job) -> dict[str, object]:
    """What a host would know: a good token, the fence and the number of its attempt."""
    attempt = job.current_attempt
    _, token = token_create(team=team, by=None, name="Next host")
    return {
        "token": token,
        "fence": attempt.fence,
        "attempt_id": attempt.pk,
        "boot_id": "boot-1",
        "claim_id": "folder-1",
    }


def prepared(case: schemathesis.Case) -> requests.PreparedRequest:
    """Return a case as a client of HTTP would send it."""
    return requests.Request(**case.as_transport_kwargs(base_url="http://testserver")).prepare()


def answered(client: Client, request: requests.PreparedRequest) -> int:
    """Return the status of the answer; what it changed is rolled back."""
    headers = {
        name: str(value)
        for name, value in request.headers.items()
        if name.lower() not in {"content-length", "content-type", "authorization", "cookie"}
    }
    body = request.body or b""
    parts = urlsplit(str(request.url))
    client.raise_request_exception = False
    with transaction.atomic():
        answer = client.generic(
            str(request.method),
            parts.path,
            body.encode() if isinstance(body, str) else body,
            content_type=str(request.headers.get("Content-Type", "application/json")),
            headers=headers,
            query_params=None,
            QUERY_STRING=parts.query,
        )
        transaction.set_rollback(True)
    return answer.status_code


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("name", OPERATIONS)
@PROPERTY
@given(data=st.data())
def test_every_answer_is_one_that_the_document_names(
    name,
    caller,
    callers,
    things,
    body_known,
    data,
):
    operation = OPERATIONS[name]
    mode = data.draw(st.sampled_from([GenerationMode.POSITIVE, GenerationMode.NEGATIVE]))
    try:
        case = data.draw(operation.as_strategy(generation_mode=mode))
    except InvalidSchema:  # nothing of it can be broken
        case = data.draw(operation.as_strategy())
    for argument in case.path_parameters or {}:
        if f"<{argument}>" in things and data.draw(st.booleans()):
            case.path_parameters[argument] = things[f"<{argument}>"]

    if isinstance(case.body, dict):
        true = {name: value for name, value in body_known.items() if name in case.body}
        case.body = {**case.body, **(true if data.draw(st.booleans()) else {})}

    calls.forget()
    status = answered(callers[caller], prepared(case))

    documented = {str(code) for code in operation.definition.raw["responses"]}
    assert status < 500
    assert str(status) in documented, case.as_curl_command()


@PROPERTY
@given(data=st.data())
def test_the_door_of_heartbeats_answers_as_its_operation_says(data, credential):
    operation = OPERATIONS["POST /api/v1/hosts/beat"]
    mode = data.draw(st.sampled_from([GenerationMode.POSITIVE, GenerationMode.NEGATIVE]))
    request = prepared(data.draw(operation.as_strategy(generation_mode=mode)))
    assert urlsplit(str(request.url)).path == agents.PATH
    body = request.body or b""
    sent = body.encode() if isinstance(body, str) else body

    calls.forget()
    answer = knock(sent, (b"authorization", f"Bearer {credential}".encode()))

    assert str(answer.status) in operation.definition.raw["responses"]
