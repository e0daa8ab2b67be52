"""The door of an endpoint: which addresses there are, who may come in, what is asked."""

import hmac
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from runners.endpoint_spec import NO_ADAPTER, key_hash
from runners.jobs.serve.asgi import (
    ClientGoneError,
    Receive,
    Scope,
    Send,
    read_body,
    send_bytes,
    send_error,
    send_json,
)
from runners.jobs.serve.contract import Ready, Relay, TemplateRefusedError
from runners.jobs.serve.conversation import Conversation, Order, Wanted
from runners.jobs.serve.protocol import (
    COMPLETION_TOKENS,
    AskedError,
    asked_chat,
    asked_completion,
)
from runners.jobs.serve.replies import ChatForm, CompletionForm
from runners.jobs.serve.service import Service

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LOADING_SECONDS = 5  # clients are asked to wait so long
PLAIN = b"text/plain; version=0.0.4; charset=utf-8"
Route = Callable[[Receive, Send], Awaitable[None]]
Prepare = Callable[[Ready, bytes], Awaitable[Order]]


class Door:
    """The ASGI application of one endpoint."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._routes: dict[tuple[str, str], Route] = {
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/v1/models"): self._models,
            ("POST", COMPLETIONS): partial(self._answer, COMPLETIONS, self._completion),
            ("POST", CHAT): partial(self._answer, CHAT, self._chat),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        try:
            route = self._route(scope["method"], scope["path"])
            if scope["path"] != "/health":
                self._check_key(scope["headers"])
            await route(receive, send)
        except AskedError as error:
            self.service.figures.count("failed" if error.is_ours else "refused")
            await send_error(send, error)
        except ClientGoneError:
            return

    def _route(self, method: str, path: str) -> Route:
        if found := self._routes.get((method, path)):
            return found
        if path.startswith("/v1/models/") and method == "GET":
            return partial(self._model, path.removeprefix("/v1/models/"))
        if known := [each for each, where in self._routes if where == path]:
            raise AskedError(405, f"{path} takes {known[0]}, not {method}.")
        raise AskedError(404, f"There is no {path} here.", code="not_found")

    def _check_key(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        hashes = self.service.spec.key_hashes
        if not hashes:
            return
        given = dict(headers).get(b"authorization", b"").decode("latin-1")
        found = key_hash(given.removeprefix("Bearer ").strip())
        # every hash is compared, so that the time tells nothing
        if sum(hmac.compare_digest(found, each) for each in hashes) == 0:
            message = "This endpoint needs its key: Authorization: Bearer KEY."
            raise AskedError(401, message, code="invalid_api_key")

    # What is asked

    async def _health(self, _receive: Receive, send: Send) -> None:
        state = self.service.state
        await send_json(send, 200 if state == "ready" else 503, {"status": state})

    async def _metrics(self, _receive: Receive, send: Send) -> None:
        text = self.service.figures.prometheus().encode()
        await send_bytes(send, 200, text, PLAIN)

    async def _models(self, _receive: Receive, send: Send) -> None:
        cards = [self.service.model_card(each) for each in self.service.names]
        await send_json(send, 200, {"object": "list", "data": cards})

    async def _model(self, name: str, _receive: Receive, send: Send) -> None:
        self._adapter_of(name)
        await send_json(send, 200, self.service.model_card(name))

    def _adapter_of(self, name: str) -> int:
        """Return the number of the adapter that a client asks for by name, or the base's.

        Raises:
            AskedError: nothing of that name is served.
        """
        served, *adapters = self.service.names
        if name == served:
            return NO_ADAPTER
        if name not in adapters:
            also = f", with adapters {', '.join(adapters)}"[:500] if adapters else ""
            message = f"The model {name[:120]!r} is not served here; {served!r} is{also}."
            raise AskedError(404, message, param="model", code="model_not_found")
        return adapters.index(name)

    async def _answer(
        self,
        path: str,
        prepare: Prepare,
        receive: Receive,
        send: Send,
    ) -> None:
        body = await read_body(receive)
        ready = self.service.ready
        if ready is None:
            message = f"The endpoint is {self.service.state}; try again in a few seconds."
            wait = LOADING_SECONDS
            raise AskedError(503, message, code=self.service.state, retry_after_seconds=wait)
        if isinstance(ready, Relay):
            handing = ready.handing(path, body)
            self._adapter_of(handing.model)
            self.service.touch()
            await handing.run(receive, send)
            return
        order = await prepare(ready, body)
        self.service.touch()
        await Conversation(ready, order).run(receive, send)

    async def _completion(self, ready: Ready, body: bytes) -> Order:
        asked = asked_completion(body)
        adapter = self._adapter_of(asked.model)
        prompts = [await ready.prompt_ids(each) for each in asked.prompts]
        form = CompletionForm(
            asked.model, ready.token_text, has_logprobs=asked.logprobs is not None
        )
        limit = asked.max_tokens or COMPLETION_TOKENS
        return Order(asked, prompts, form, Wanted(limit, asked.logprobs, "prompt", adapter))

    async def _chat(self, ready: Ready, body: bytes) -> Order:
        asked = asked_chat(body)
        adapter = self._adapter_of(asked.model)
        try:
            prompt = await ready.chat_ids([each.plain for each in asked.messages])
        except TemplateRefusedError as refusal:
            message = f"The model's chat template refuses these messages: {refusal}"
            raise AskedError(400, message, param="messages") from None
        form = ChatForm(asked.model, ready.token_text, has_logprobs=bool(asked.logprobs))
        top = (asked.top_logprobs or 0) if asked.logprobs else None
        limit = asked.max_completion_tokens or asked.max_tokens
        return Order(asked, [prompt], form, Wanted(limit, top, "messages", adapter))
