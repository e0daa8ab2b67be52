"""A serving job's pages: its address, and a playground that asks this machine's endpoint alone."""

import json
from functools import partial
from urllib.parse import urlencode

import httpx
import pytest
from asgiref.sync import async_to_sync
from django.http import QueryDict

from tests.webapp.conftest import STARTED, batch_of, client_of
from tests.webapp.jobs.undone import undone
from webapp.agents.ingest import events_accept
from webapp.core.problems import ConflictProblem
from webapp.jobs.endpoints import Endpoint, endpoint_of, hashes_of, new_key
from webapp.jobs.models import Job
from webapp.pages.playground import NOT_NOW, PlaygroundForm, call_of, stream_text, whole_answer

pytestmark = [pytest.mark.django_db(databases="__all__"), pytest.mark.filterwarnings("ignore")]

VALUES = {"prompt": "import", "form": "chat", "temperature": 0.0, "max_tokens": 5}

SPEC = {"kind": "serve", "model": {"source": "folder", "path": "tiny"}}


@pytest.fixture
def told(attempt, settings, tmp_path):
    """Let the job serve, at an address that its host tells; the host is this machine."""
    settings.DATA_DIR = tmp_path
    (tmp_path / "host").mkdir()
    credential = tmp_path / "host" / "credential.json"
    credential.write_text(json.dumps({"host_id": attempt.host_id}))

    def tell(host: str = "127.0.0.1", port: int = 8000, hashes: tuple[str, ...] = ()) -> Job:
        Job.objects.filter(pk=attempt.job_id).update(
            kind="serve", spec={**SPEC, "key_hashes": list(hashes)}
        )
        body = {"host": host, "port": port, "model": "tiny", "has_keys": bool(hashes)}
        batch = batch_of(attempt, ("started", STARTED), ("endpoint", body))
        events_accept(host=attempt.host, batch=batch)
        return Job.objects.get(pk=attempt.job_id)

    return tell


def page_of(user, job: Job, tab: str = "") -> str:
    return client_of(user).get(f"/jobs/{job.pk}/{tab}").content.decode()


def test_the_job_page_shows_the_address_and_how_to_ask(told, alice):
    page = page_of(alice, told(hashes=hashes_of(new_key())))
    assert "http://127.0.0.1:8000/v1" in page
    assert "ssh -L 8000:127.0.0.1:8000" in page
    assert "$OPENAI_API_KEY" in page
    assert "The key is shown only once" in page
    assert "start a new endpoint" in page


def test_a_prompt_of_several_lines_reaches_the_endpoint_as_it_was_written(told):
    form = PlaygroundForm(told(), QueryDict(urlencode({**VALUES, "prompt": "def f():\r\n\r\n  "})))
    assert form.is_valid(), form.errors
    assert form.cleaned_data["prompt"] == "def f():\n\n  "


def test_the_playground_asks_the_adapter_that_was_chosen(told, alice):
    job = told()
    adapter = {"name": "poems-1", "adapter": {"source": "folder", "path": "poems"}}
    job.spec |= {"adapters": [adapter], "served_name": "tiny"}
    job.save()
    page = page_of(alice, job, "playground/")
    call = call_of(job, endpoint_of(job), {**VALUES, "model": "poems-1"}, stream=False)
    assert '<option value="poems-1">poems-1</option>' in page
    assert call.document["model"] == "poems-1"


def test_the_playground_has_a_form_on_this_machine_and_asks_for_no_model(told, alice):
    job = told()
    page = page_of(alice, job, "playground/")
    assert "data-playground" in page
    assert 'name="model"' not in page
    assert "data-awaited" not in page
    assert call_of(job, endpoint_of(job), VALUES, stream=False).document["model"] == "tiny"


def test_before_it_answers_the_page_says_that_it_comes_up(told, alice, attempt):
    job = told()
    attempt.events.filter(kind="endpoint").delete()
    assert "The endpoint is starting" in page_of(alice, job)
    page = page_of(alice, job, "playground/")
    assert "is not ready yet" in page
    assert "data-awaited" in page  # jobs.js loads the page anew once an answer lacks it


def test_an_address_that_is_not_this_machines_loopback_is_never_asked(told, alice):
    for address in ["10.0.0.7", "169.254.169.254", "::1", "0.0.0.0"]:
        with undone(address):
            job = told(host=address)
            page = client_of(alice).post(f"/jobs/{job.pk}/playground/answer/", VALUES)
            assert page.status_code == 422
            assert "This server cannot reach the endpoint" in page.content.decode()
            with pytest.raises(ConflictProblem):
                call_of(job, endpoint_of(job), VALUES, stream=False)


def test_another_machines_host_is_not_asked_though_it_says_loopback(told, alice, settings):
    job = told()
    (settings.DATA_DIR / "host" / "credential.json").write_text('{"host_id": "another"}')
    assert not endpoint_of(job).is_local
    assert "ssh -L" in page_of(alice, job, "playground/")


def test_a_job_that_ended_is_not_asked(told):
    job = told()
    Job.objects.filter(pk=job.pk).update(state="stopped")
    assert endpoint_of(Job.objects.get(pk=job.pk)) is None


def test_a_wrong_field_is_named_and_nothing_is_asked(told, alice):
    for changes, words in [
        ({"max_tokens": 0}, "Max tokens is 0. It must be a whole number from 1 to 100,000."),
        ({"temperature": 9}, "Temperature is 9. It must be a number from 0 to 2."),
        ({"prompt": ""}, "Prompt: "),
    ]:
        with undone(changes):
            job = told()
            headers = {"accept": "text/event-stream"}

            answer = client_of(alice).post(
                f"/jobs/{job.pk}/playground/answer/", {**VALUES, **changes}, headers=headers
            )

            assert answer.status_code == 422
            assert answer["Content-Type"] == "text/plain; charset=utf-8"
            assert answer.content.decode().startswith(words)


def test_an_endpoint_that_is_gone_is_said_in_words(told):
    gone = Endpoint("127.0.0.1", 1, "tiny", has_keys=False, is_local=True)
    assert whole_answer(call_of(told(), gone, VALUES, stream=False)) == NOT_NOW


def test_a_streamed_text_may_hold_what_python_takes_for_the_end_of_a_line(told, monkeypatch):
    document = {"choices": [{"delta": {"content": "a\u2028b\u0085c"}}]}
    events = f": waiting\n\ndata: {json.dumps(document, ensure_ascii=False)}\n\ndata: [DONE]\n\n"
    answer = httpx.MockTransport(lambda _request: httpx.Response(200, content=events.encode()))
    monkeypatch.setattr(httpx, "AsyncClient", partial(httpx.AsyncClient, transport=answer))
    endpoint = Endpoint("127.0.0.1", 1, "tiny", has_keys=False, is_local=True)
    call = call_of(told(), endpoint, VALUES, stream=True)

    async def read() -> str:
        return "".join([each async for each in stream_text(call)])

    assert async_to_sync(read)() == "a\u2028b\u0085c"


def test_a_job_of_another_kind_has_no_playground(job, alice):
    assert client_of(alice).get(f"/jobs/{job.pk}/playground/").status_code == 302
    assert "Playground" not in page_of(alice, job)
