"""One request to an endpoint, from what was understood of it to its last byte.

A client that goes away takes its answers with it: their pages are free after the current pass.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import NamedTuple

from runners.endpoint_spec import NO_ADAPTER
from runners.jobs.serve.asgi import (
    ClientGoneError,
    Document,
    Receive,
    Send,
    disconnected,
    event_of,
    send_json,
    send_part,
)
from runners.jobs.serve.contract import (
    EngineEndedError,
    Piece,
    QueueFullError,
    Ready,
    Sampling,
    Wish,
)
from runners.jobs.serve.protocol import Asked, AskedError
from runners.jobs.serve.replies import Form, Written, usage

RETRY_SECONDS = 1
STREAM_END = b"data: [DONE]\n\n"
DEAD = "The engine ended while it answered. See the job's page for the reason."
Prompts = Sequence[Sequence[int]]


class Wanted(NamedTuple):
    """What the two forms ask for under names of their own."""

    max_tokens: int | None
    top_logprobs: int | None
    param: str  # the field that the prompts came in
    adapter: int = NO_ADAPTER


class Order:
    """A request that was understood: its prompts in tokens, and how it is answered."""

    def __init__(self, asked: Asked, prompts: Prompts, form: Form, wanted: Wanted) -> None:
        self.asked = asked
        self.prompts = prompts
        self.form = form
        self.max_tokens, self.top_logprobs, self.param, self.adapter = wanted

    def sampling(self, prompt: Sequence[int], choice: int, max_length: int) -> Sampling:
        """Return how one choice is written.

        Raises:
            AskedError: the prompt leaves no room for the answer.
        """
        room = max_length - len(prompt)
        wanted = self.max_tokens if self.max_tokens is not None else max(1, room)
        if not prompt:
            raise AskedError(400, f"{self.param} holds no token", param=self.param)
        if wanted > room:
            message = (
                f"This model's maximum context length is {max_length} tokens. However, you "
                f"requested {len(prompt) + wanted} tokens ({len(prompt)} in the {self.param}, "
                f"{wanted} in the completion). Please reduce the length of either."
            )
            raise AskedError(400, message, param=self.param, code="context_length_exceeded")
        asked = self.asked
        return Sampling(
            wanted,
            1.0 if asked.temperature is None else asked.temperature,
            1.0 if asked.top_p is None else asked.top_p,
            None if asked.seed is None else asked.seed + choice,
            asked.stops,
            self.top_logprobs,
            asked.ignore_eos,
        )


class Conversation:
    """One request from its first token to its last, or until its client goes."""

    def __init__(self, ready: Ready, order: Order) -> None:
        self.ready = ready
        self.order = order
        self.pieces: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
        self.wishes = self._wishes()
        self.written = [Written() for _ in self.wishes]

    def _wishes(self) -> list[Wish]:
        loop = asyncio.get_running_loop()
        order, longest = self.order, self.ready.engine.limits.max_length
        wishes: list[Wish] = []
        for prompt in order.prompts:
            for choice in range(order.asked.num_choices):
                deliver = partial(self._deliver, loop, len(wishes))
                sampling = order.sampling(prompt, choice, longest)
                wishes.append(Wish(prompt, sampling, deliver, order.adapter))
        return wishes

    def _deliver(self, loop: asyncio.AbstractEventLoop, index: int, piece: Piece) -> None:
        with suppress(RuntimeError):  # the loop ended meanwhile
            loop.call_soon_threadsafe(self.pieces.put_nowait, (index, piece))

    async def run(self, receive: Receive, send: Send) -> None:
        """Let the engine write, and send it; what nobody waits for is cancelled."""
        try:
            replies = self.ready.ask(self.wishes)
        except QueueFullError:
            message = "Too many requests wait already; try again shortly."
            raise AskedError(
                429, message, code="queue_full", retry_after_seconds=RETRY_SECONDS
            ) from None
        except EngineEndedError:
            raise AskedError(503, "The endpoint is ending.", code="draining") from None
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            async with aclosing(self._until(gone)) as pieces:
                await (self._stream if self.order.asked.stream else self._whole)(pieces, send)
        finally:
            gone.cancel()
            self.ready.engine.cancel(
                [
                    reply
                    for reply, written in zip(replies, self.written, strict=True)
                    if written.finish_reason is None
                ]
            )

    async def _until(self, gone: asyncio.Future[None]) -> AsyncGenerator[tuple[int, Piece]]:
        """Yield pieces until every answer is complete.

        Raises:
            ClientGoneError: nobody waits any more.
        """
        while any(each.finish_reason is None for each in self.written):
            coming = asyncio.ensure_future(self.pieces.get())
            await asyncio.wait((coming, gone), return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                coming.cancel()
                raise ClientGoneError
            index, piece = coming.result()
            self.written[index].add(piece)
            yield index, piece

    async def _whole(self, pieces: AsyncIterator[tuple[int, Piece]], send: Send) -> None:
        async for _, piece in pieces:
            if piece.finish_reason == "error":
                raise AskedError(500, DEAD, code="engine_ended")
        await send_json(send, 200, self.order.form.document(self.written, self._used()))

    async def _stream(self, pieces: AsyncIterator[tuple[int, Piece]], send: Send) -> None:
        form = self.order.form
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for index in range(len(self.wishes)):
            if opening := form.opening(index):
                await self._send_chunk(send, opening)
        async for index, piece in pieces:
            if piece.finish_reason == "error":
                error = AskedError(500, DEAD, code="engine_ended")
                await send_part(send, event_of(error.document))
                await send_part(send, b"", more=False)
                return
            await self._send_chunk(send, form.part(index, piece))
        if self.order.asked.wants_usage:
            await send_part(send, event_of(form.closing(self._used())))
        await send_part(send, STREAM_END, more=False)

    async def _send_chunk(self, send: Send, chunk: Document) -> None:
        asked = self.order.asked
        if asked.wants_usage:
            chunk = {**chunk, "usage": self._used() if asked.counts_on else None}
        await send_part(send, event_of(chunk))

    def _used(self) -> Document:
        written = sum(each.output_tokens for each in self.written)
        return usage(sum(map(len, self.order.prompts)), written)
