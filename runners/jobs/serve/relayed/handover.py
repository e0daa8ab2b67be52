"""Have a prompt read by one engine and its answer written by another.

The engine that reads is asked for one token and keeps the prompt's cache; what it says of where
the cache lies goes to the engine that writes, which fetches it and frees it there.

Source: vLLM 0.32.0, ``vllm/distributed/kv_transfer/kv_connector/v1/nixl/``: ``pull_scheduler.py``
for the fields that are asked and answered, ``base_scheduler.py`` for the lease of 30 s after which
a cache that nobody fetched is freed.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx

from runners.jobs.serve.protocol import AskedError
from runners.jobs.serve.relayed.engines import Engines
from runners.jobs.serve.relayed.process import ServerProcess
from runners.jobs.serve.relayed.refusal import refusal
from runners.jobs.serve.relayed.scrape import Twice
from runners.jobs.serve.relayed.wishes import Handed, HandedChat, num_answers

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
# Of the answer alone: who reads writes one token, in one piece.
OF_THE_ANSWER = ("stream", "stream_options", "min_tokens", "max_completion_tokens")


class Course(NamedTuple):
    """Which engine writes an answer, and what it is asked."""

    engine: ServerProcess
    document: Document


@asynccontextmanager
async def course_of(
    engines: Engines, client: httpx.AsyncClient, path: str, asked: Handed, document: Document
) -> AsyncIterator[Course]:
    """Yield who is asked for an answer and what, once its prompt was read elsewhere if it is.

    Raises:
        AskedError: the engine that reads refuses the request, or does not keep to the form.
        httpx.HTTPError: it is gone.
    """
    if engines.is_split and is_read_elsewhere(asked):
        with engines.lent(engines.prefill) as reader:
            document = await _read(engines, reader, client, path, document)
    elif engines.is_split:
        engines.undivided += 1
    among = engines.prefill if engines.is_split and _limit(asked) == 1 else engines.decode
    with engines.lent(among) as writer:
        yield Course(writer, document)


def is_read_elsewhere(asked: Handed) -> bool:
    """Return whether a cache travels for a request.

    One token is there once the prompt is read; several answers would fetch one cache which is
    freed after the first, so that their engine reads for itself.
    """
    return num_answers(asked) == 1 and _limit(asked) != 1


def _limit(asked: Handed) -> int | None:
    """Return the most tokens of an answer."""
    longest = asked.max_completion_tokens if isinstance(asked, HandedChat) else None
    return longest or asked.max_tokens


def reading_of(document: Document) -> Document:
    """Return what the engine is asked that reads: the same prompt, and one token."""
    own = {name: value for name, value in document.items() if name not in OF_THE_ANSWER}
    if own.get("tool_choice") not in {None, "none", "auto"}:  # one token is no whole call
        own["tool_choice"] = "none"
    return own | {"max_tokens": 1, "stream": False, PARAMS: KEPT_FOR_ANOTHER}


async def _read(
    engines: Engines,
    reader: ServerProcess,
    client: httpx.AsyncClient,
    path: str,
    document: Document,
) -> Document:
    """Have a prompt read; return what is asked of the engine that writes."""
    answer = await client.post(
        f"{reader.address}{path}", json=reading_of(document), headers=reader.headers
    )
    if not answer.is_success:
        raise refusal(answer.status_code, answer.content)
    params, counted = _said(answer)
    if params is None:  # nothing is kept there: who writes reads for itself
        engines.undivided += 1
        return document
    engines.handed_over += 1
    before = engines.twice
    engines.twice = Twice(before.prompt + counted.prompt, before.output + counted.output)
    return document | {PARAMS: params}


def _said(answer: httpx.Response) -> tuple[Document | None, Twice]:
    """Return where the cache lies, None where none is kept, and what was counted.

    Raises:
        AskedError: it is no answer in the form that is known.
    """
    try:
        said = answer.json()
        params, usage = said.get(PARAMS), said["usage"]
        counted = Twice(int(usage["prompt_tokens"]), int(usage["completion_tokens"]))
        is_kept = params is not None and bool(params["do_remote_prefill"])
    except (ValueError, KeyError, TypeError, AttributeError):
        message = "The engine that reads prompts did not say where it keeps what it read."
        raise AskedError(500, message, code="engine_error") from None
    return (dict(params) if is_kept else None), counted
