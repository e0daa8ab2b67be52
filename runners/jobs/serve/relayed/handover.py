"""Prefill/decode disaggregation: one engine reads a prompt, another generates the answer.

The prefill engine generates one token and keeps the prompt's KV cache; the transfer parameters of
its response go to the decode engine, which fetches the cache and frees it there.

Source: vLLM 0.32.0, ``vllm/distributed/kv_transfer/kv_connector/v1/nixl/``: ``pull_scheduler.py``
for the request and response fields, ``base_scheduler.py`` for the 30 s lease after which a
cache that was not fetched is freed.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx

from runners.jobs.serve.protocol import RequestError
from runners.jobs.serve.relayed.engines import Engines
from runners.jobs.serve.relayed.process import ServerProcess
from runners.jobs.serve.relayed.refusal import refusal
from runners.jobs.serve.relayed.request_fields import Handed, HandedChat, num_answers
from runners.jobs.serve.relayed.scrape import Twice

Document = dict[str, Any]
PARAMS = "kv_transfer_params"
KEPT_FOR_ANOTHER: Document = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# Fields of the answer only: the prefill engine returns one token, not streamed.
OF_THE_ANSWER = ("stream", "stream_options", "min_tokens", "max_completion_tokens")


class Course(NamedTuple):
    """The engine that generates an answer, and its request body."""

    engine: ServerProcess
    document: Document


@asynccontextmanager
async def course_of(
    engines: Engines, client: httpx.AsyncClient, path: str, asked: Handed, document: Document
) -> AsyncIterator[Course]:
    """Prefill the prompt if it runs in another engine; yield the answering engine and its request.

    Raises:
        RequestError: the prefill engine rejects the request or its response is malformed.
        httpx.HTTPError: the engine is down.
    """
    if engines.is_split and is_read_elsewhere(asked):
        with engines.lent(engines.prefill) as reader:
            document = await _prefill(engines, reader, client, path, document)
    elif engines.is_split:
        engines.undivided += 1
    among = engines.prefill if engines.is_split and _limit(asked) == 1 else engines.decode
    with engines.lent(among) as writer:
        yield Course(writer, document)


def is_read_elsewhere(asked: Handed) -> bool:
    """Return whether prompt and answer of a request are divided between two engines.

    A one-token answer is complete after prefill. Several answers would fetch one cache that is
    freed after the first, so one engine handles the whole request.
    """
    return num_answers(asked) == 1 and _limit(asked) != 1


def _limit(request: Handed) -> int | None:
    """Return the token limit of an answer."""
    longest = request.max_completion_tokens if isinstance(request, HandedChat) else None
    return longest or request.max_tokens


def reading_of(document: Document) -> Document:
    """Return the body for the prefill engine: the same prompt, and one token."""
    own = {name: value for name, value in document.items() if name not in OF_THE_ANSWER}
    if own.get("tool_choice") not in {None, "none", "auto"}:  # one token is no complete call
        own["tool_choice"] = "none"
    return own | {"max_tokens": 1, "stream": False, PARAMS: KEPT_FOR_ANOTHER}


async def _prefill(
    engines: Engines,
    reader: ServerProcess,
    client: httpx.AsyncClient,
    path: str,
    document: Document,
) -> Document:
    """Run the prefill; return the body for the decode engine."""
    answer = await client.post(
        f"{reader.address}{path}", json=reading_of(document), headers=reader.headers
    )
    if not answer.is_success:
        raise refusal(answer.status_code, answer.content)
    params, counted = _parsed(answer)
    if params is None:  # no cache was kept: the decode engine prefills itself
        engines.undivided += 1
        return document
    engines.handed_over += 1
    before = engines.twice
    engines.twice = Twice(before.prompt + counted.prompt, before.output + counted.output)
    return document | {PARAMS: params}


def _parsed(answer: httpx.Response) -> tuple[Document | None, Twice]:
    """Return the cache transfer parameters, or None if no cache is kept, and the token counts.

    Raises:
        RequestError: the response has an unknown format.
    """
    try:
        body = answer.json()
        params, usage = body.get(PARAMS), body["usage"]
        counted = Twice(int(usage["prompt_tokens"]), int(usage["completion_tokens"]))
        is_kept = params is not None and bool(params["do_remote_prefill"])
    except (ValueError, KeyError, TypeError, AttributeError):
        message = "The engine that reads prompts did not say where it keeps what it read."
        raise RequestError(500, message, code="engine_error") from None
    return (dict(params) if is_kept else None), counted
