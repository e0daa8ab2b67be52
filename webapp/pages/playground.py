"""The playground of an endpoint: this server sends one prompt and shows the answer.

It only calls an endpoint on this machine's own loopback, at the port that the machine's own
host reported for a running job of the person's team; the browser supplies no part of the URL.
"""

import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import httpx
from django import forms
from django.core.exceptions import PermissionDenied
from django.http import (
    HttpRequest,
    HttpResponse,
    HttpResponseBase,
    QueryDict,
    StreamingHttpResponse,
)
from django.shortcuts import redirect, render
from django.views.decorators.http import require_GET, require_POST

from runners.datasets.text import unix_lines
from runners.shared.event_streams import read_events
from webapp.accounts.models import Role
from webapp.accounts.services import is_at_least, membership_of
from webapp.core.problems import ConflictProblem
from webapp.jobs.endpoints import Endpoint, endpoint_of, playground_key
from webapp.jobs.lookup import load_job
from webapp.jobs.models import Job
from webapp.pages.jobs import job_context
from webapp.wizard.forms import DecimalNumber, WholeNumber

TIMEOUT = httpx.Timeout(120.0, connect=5.0)
STREAM = "text/event-stream"
PLAIN = "text/plain; charset=utf-8"
NOT_NOW = "The endpoint does not answer at the moment. See the job's state and its log."


class PlaygroundForm(forms.Form):
    """The prompt form."""

    prompt = forms.CharField(
        max_length=20_000,
        initial="What is a language model?",
        strip=False,
        widget=forms.Textarea(attrs={"rows": 6}),
    )
    form = forms.ChoiceField(
        label="Prompt type",
        choices=[("chat", "Chat message"), ("text", "Text to complete")],
        initial="chat",
    )
    temperature = DecimalNumber("Temperature", 0, 2, initial=0.7)
    max_tokens = WholeNumber("Max tokens", 1, 100_000, initial=64)

    def clean_prompt(self) -> str:
        """Return the prompt as it was written: its lines' ends are those of the browser."""
        return unix_lines(str(self.cleaned_data["prompt"]))

    def __init__(self, job: Job, data: QueryDict | None = None) -> None:
        super().__init__(data)
        adapters = [each["name"] for each in job.spec.get("adapters", ())]
        if adapters:
            base = job.spec.get("served_name", "")
            choices = [(base, f"{base}, no adapter"), *((name, name) for name in adapters)]
            self.fields["model"] = forms.ChoiceField(choices=choices)


class Call(NamedTuple):
    """One request to an endpoint."""

    url: str
    headers: dict[str, str]
    document: dict[str, Any]


@require_GET
def playground(request: HttpRequest, job_id: str) -> HttpResponse:
    """Show the prompt form, or how to reach an endpoint that this server may not call."""
    job = _job_for(request, job_id)
    if job.kind != "serve":
        return redirect("job-detail", job.pk)
    return _page(request, job, PlaygroundForm(job))


@require_POST
def playground_answer(request: HttpRequest, job_id: str) -> HttpResponseBase:
    """Answer a prompt: as a stream for the page's script, else as a full page."""
    job = _job_for(request, job_id)
    if job.kind != "serve":
        return redirect("job-detail", job.pk)
    form = PlaygroundForm(job, request.POST)
    endpoint = endpoint_of(job)
    is_stream = request.headers.get("Accept") == STREAM
    if not form.is_valid() or endpoint is None or not endpoint.is_local:
        if is_stream:
            return HttpResponse(_refusal(form), status=422, content_type=PLAIN)
        return _page(request, job, form, status=422)
    call = call_of(job, endpoint, form.cleaned_data, stream=is_stream)
    if is_stream:
        return StreamingHttpResponse(stream_text(call), content_type=PLAIN)
    return _page(request, job, form, answer=whole_answer(call))


def _job_for(request: HttpRequest, job_id: str) -> Job:
    job = load_job(request, job_id)
    membership = membership_of(request.user, job.team)
    if membership is None or not is_at_least(Role(membership.role), Role.PRACTITIONER):
        raise PermissionDenied("To use an endpoint you need the role Practitioner or higher.")
    return job


def _page(
    request: HttpRequest, job: Job, form: PlaygroundForm, *, answer: str = "", status: int = 200
) -> HttpResponse:
    context = job_context(request, job, "job-playground")
    context |= {"form": form, "answer": answer, "endpoint": endpoint_of(job)}
    return render(request, "jobs/playground.html", context, status=status)


def _refusal(form: PlaygroundForm) -> str:
    first = next(iter(form.errors.items()), None)
    if first is None:
        return NOT_NOW
    label, words = str(form[first[0]].label), str(first[1][0])
    return words if words.startswith(label) else f"{label}: {words}"


def call_of(job: Job, endpoint: Endpoint, values: dict[str, Any], *, stream: bool) -> Call:
    """Return the request that carries a prompt.

    Raises:
        ConflictProblem: this server may not call the endpoint.
    """
    if not endpoint.is_local:
        raise ConflictProblem(
            "not_local", "This server reaches only endpoints on its own machine."
        )
    hashes = job.spec.get("key_hashes") or [""]
    headers = {"Authorization": f"Bearer {playground_key(hashes[0])}"} if endpoint.has_keys else {}
    fields = {name: values[name] for name in ("temperature", "max_tokens")}
    document = {"model": values.get("model") or endpoint.model, "stream": stream, **fields}
    if values["form"] == "chat":
        messages = [{"role": "user", "content": values["prompt"]}]
        return Call(f"{endpoint.url}/chat/completions", headers, document | {"messages": messages})
    return Call(f"{endpoint.url}/completions", headers, document | {"prompt": values["prompt"]})


def whole_answer(call: Call) -> str:
    """Return the text of an answer, or the endpoint's error message."""
    try:
        with httpx.Client(trust_env=False, timeout=TIMEOUT) as client:
            answer = client.post(call.url, headers=call.headers, json=call.document)
    except httpx.HTTPError:
        return NOT_NOW
    return _text_of(answer.content) or "The answer is empty: the first token ended it."


async def stream_text(call: Call) -> AsyncIterator[str]:
    """Yield the text as it is generated; generation stops when the client disconnects."""
    try:
        async with (
            httpx.AsyncClient(trust_env=False, timeout=TIMEOUT) as client,
            client.stream("POST", call.url, headers=call.headers, json=call.document) as answer,
        ):
            if answer.status_code != httpx.codes.OK:
                yield _text_of(await answer.aread())
                return
            async for event in read_events(answer.aiter_bytes()):
                if event.startswith(b"data: {"):
                    yield _text_of(event.removeprefix(b"data: "))
    except httpx.HTTPError:
        yield f"\n{NOT_NOW}"


def _text_of(document: bytes) -> str:
    """Return the text of a response, chunk or error of the endpoint."""
    try:
        parsed = json.loads(document)
        if "error" in parsed:
            return str(parsed["error"]["message"])
        first = parsed["choices"][0]
        message = first.get("message") or first.get("delta") or first
        return str(message.get("content") or message.get("text") or "")
    except (ValueError, LookupError, TypeError, AttributeError):
        return NOT_NOW
