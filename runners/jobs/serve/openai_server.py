"""The ASGI application of an endpoint: state, routes, API keys and request handling."""

import hmac
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Literal

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
from runners.jobs.serve.conversation import ChatForm, CompletionForm, Conversation, Order, Wanted
from runners.jobs.serve.figures import Figures
from runners.jobs.serve.protocol import (
    COMPLETION_TOKENS,
    RequestError,
    parse_chat,
    parse_completion,
)
from runners.jobspec import ServeSpec
from runners.jobspec.serve import NO_ADAPTER, key_hash

# The state of an endpoint: loading, ready, draining or failed; and the model it serves.


State = Literal["loading", "ready", "draining", "failed"]


class Service:
    """The endpoint's state as the HTTP server sees it."""

    def __init__(self, spec: ServeSpec) -> None:
        self.spec = spec
        self.figures = Figures()
        self.state: State = "loading"
        self.loaded: Ready | Relay | None = None
        self.asked_at = time.monotonic()
        self._created = int(time.time())

    @property
    def ready(self) -> Ready | Relay | None:
        """Return the model if requests are accepted."""
        return self.loaded if self.state == "ready" else None

    @property
    def names(self) -> list[str]:
        """Return the names that clients may request: the model, then its adapters."""
        return [self.spec.served_name, *(each.name for each in self.spec.adapters)]

    def model_card(self, name: str) -> dict[str, Any]:
        """Return the served model, or one of its adapters, as ``/v1/models`` lists it."""
        card: dict[str, Any] = {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "slipway",
        }
        if name != self.spec.served_name:
            card["parent"] = self.spec.served_name
        if self.loaded is not None:
            card["max_model_len"] = self.loaded.engine.limits.max_length
        return card

    def open(self, loaded: Ready | Relay) -> None:
        """Accept requests from now on, unless the endpoint was stopped meanwhile."""
        self.loaded = loaded
        self.touch()
        if self.state == "loading":
            self.state = "ready"

    def lose(self) -> None:
        """Refuse requests until another engine is loaded, unless the endpoint is ending."""
        self.loaded = None
        if self.state == "ready":
            self.state = "loading"

    def touch(self) -> None:
        """Record that a request arrived."""
        self.asked_at = time.monotonic()


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LOADING_SECONDS = 5  # Retry-After while the model loads
PLAIN = b"text/plain; version=0.0.4; charset=utf-8"
Route = Callable[[Receive, Send], Awaitable[None]]
Prepare = Callable[[Ready, bytes], Awaitable[Order]]


class OpenAIServer:
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
        except RequestError as error:
            self.service.figures.count("failed" if error.is_ours else "refused")
            await send_error(send, error)
        except ClientGoneError:
            return

    def _route(self, method: str, path: str) -> Route:
        if route := self._routes.get((method, path)):
            return route
        if path.startswith("/v1/models/") and method == "GET":
            return partial(self._model, path.removeprefix("/v1/models/"))
        if methods := [each for each, where in self._routes if where == path]:
            raise RequestError(405, f"{path} takes {methods[0]}, not {method}.")
        raise RequestError(404, f"There is no {path} here.", code="not_found")

    def _check_key(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        hashes = self.service.spec.key_hashes
        if not hashes:
            return
        header = dict(headers).get(b"authorization", b"").decode("latin-1")
        digest = key_hash(header.removeprefix("Bearer ").strip())
        # compare with every hash: constant time
        if sum(hmac.compare_digest(digest, each) for each in hashes) == 0:
            message = "This endpoint needs its key: Authorization: Bearer KEY."
            raise RequestError(401, message, code="invalid_api_key")

    # Handlers

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
        """Return the index of the adapter with this name, or ``NO_ADAPTER`` for the base model.

        Raises:
            RequestError: no served model or adapter has this name.
        """
        served, *adapters = self.service.names
        if name == served:
            return NO_ADAPTER
        if name not in adapters:
            also = f", with adapters {', '.join(adapters)}"[:500] if adapters else ""
            message = f"The model {name[:120]!r} is not served here; {served!r} is{also}."
            raise RequestError(404, message, param="model", code="model_not_found")
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
            raise RequestError(503, message, code=self.service.state, retry_after_seconds=wait)
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
        request = parse_completion(body)
        adapter = self._adapter_of(request.model)
        prompts = [await ready.prompt_ids(each) for each in request.prompts]
        form = CompletionForm(
            request.model, ready.token_text, has_logprobs=request.logprobs is not None
        )
        limit = request.max_tokens or COMPLETION_TOKENS
        return Order(request, prompts, form, Wanted(limit, request.logprobs, "prompt", adapter))

    async def _chat(self, ready: Ready, body: bytes) -> Order:
        request = parse_chat(body)
        adapter = self._adapter_of(request.model)
        try:
            prompt = await ready.chat_ids([each.plain for each in request.messages])
        except TemplateRefusedError as refusal:
            message = f"The model's chat template refuses these messages: {refusal}"
            raise RequestError(400, message, param="messages") from None
        form = ChatForm(request.model, ready.token_text, has_logprobs=bool(request.logprobs))
        top = (request.top_logprobs or 0) if request.logprobs else None
        limit = request.max_completion_tokens or request.max_tokens
        return Order(request, [prompt], form, Wanted(limit, top, "messages", adapter))
