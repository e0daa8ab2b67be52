"""The interface between the HTTP server and the engines, with limits on lengths; without torch."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from runners.jobs.runtime import BadInputError
from runners.jobs.serve.constraints import Constraint
from runners.jobs.serve.openai_requests import RequestError
from runners.jobs.serve.tool_calls import ToolCall
from runners.jobspec import ServeSpec
from runners.jobspec.serve import NO_ADAPTER
from runners.shared.event_streams import TokensUsed

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # a character whose last bytes are still missing

FinishReason = Literal["stop", "length", "tool_calls", "error"]


Turn = dict[str, Any]  # a message as chat templates expect it, a call's arguments as JSON text


class QueueFullError(Exception):
    """The request queue is full."""


class EngineEndedError(Exception):
    """The engine has stopped and accepts no requests."""


class EngineProcessError(Exception):
    """An engine that runs in its own process has exited by itself or does not respond."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one answer, and which logprobs it reports."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stops: tuple[str, ...] = ()
    top_logprobs: int | None = None  # alternatives reported per token; None: no logprobs
    ignore_eos: bool = False
    top_k: int = 0  # most likely tokens that are kept; 0: all
    min_p: float = 0.0  # least probability that is kept, as a share of the largest
    repetition_penalty: float = 1.0  # divides the logits of the prompt's and answer's tokens
    presence_penalty: float = 0.0  # less for each token that the answer has
    frequency_penalty: float = 0.0  # less for each time that the answer has it
    logit_bias: tuple[tuple[int, float], ...] = ()  # added to a token's logit
    shown_tokens: tuple[str, ...] = ()  # special tokens that stay in the text
    constraint: Constraint | None = None  # what the answer is held to


@dataclass(frozen=True)
class Choice:
    """A sampled token, its log probability before temperature, and the most likely tokens."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class TokenLogprob:
    """The logprobs of one answer token; ``at`` is the offset of its text in the answer."""

    choice: Choice
    at: int


@dataclass(frozen=True)
class StreamChunk:
    """The text, tokens and logprobs of an answer since the previous chunk."""

    text: str = ""
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: FinishReason | None = None
    output_tokens: int = 0  # of the whole answer so far
    stop_text: str | None = None  # the stop string that ended the answer
    cached_tokens: int | None = None  # of the prompt, from a prefix cache; None: not reported
    calls: Sequence[ToolCall] = ()  # that are complete since the previous chunk


class GenerationRequest(NamedTuple):
    """One answer to generate, and the callback that receives its chunks."""

    prompt: Sequence[int]
    sampling: Sampling
    deliver: Callable[[StreamChunk], None]
    adapter: int = NO_ADAPTER  # index of the adapter


# Receives a text's place among those of its request, and its embedding; None: the engine ended.
Delivered = Callable[[int, list[float] | None], None]


@dataclass(eq=False)
class Pending:
    """One answer that is being generated, by any engine."""

    is_cancelled: bool = field(default=False, kw_only=True)
    asked_at: float = field(default_factory=time.perf_counter, kw_only=True)
    last_at: float = field(default=0.0, kw_only=True)


@dataclass(frozen=True)
class Limits:
    """Capacity limits of an engine."""

    max_concurrency: int
    queue_limit: int
    max_length: int
    end_ids: frozenset[int]
    step_tokens: int = 512  # token budget of a step: prefill chunks and decoding tokens together

    @property
    def most_answers(self) -> int:
        """Return how many answers run and wait at once."""
        return self.max_concurrency + self.queue_limit


class BoundedEngine(ABC):
    """The capacity of an engine: how many answers it has, and whether it takes more."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.is_closed = False
        self.changed = threading.Condition()

    @property
    @abstractmethod
    def num_open(self) -> int:
        """Return the number of answers that are running or queued."""

    @property
    def is_idle(self) -> bool:
        """Return whether no request is running or queued."""
        return not self.num_open

    def admit(self, answers: int) -> None:
        """Check that the engine or its queue has room for a request.

        Raises:
            RequestError: the request has more answers than the engine ever holds.
            QueueFullError: the queue is full.
            EngineEndedError: the engine has failed or was stopped.
        """
        if self.is_closed:
            raise EngineEndedError
        if answers > self.limits.most_answers:
            raise self._too_many(answers)
        if self.num_open + answers > self.limits.most_answers:
            raise QueueFullError

    def _too_many(self, answers: int) -> RequestError:
        limits = self.limits
        message = (
            f"The request has {answers} answers (its prompts times n); this endpoint holds at "
            f"most {limits.most_answers}: {limits.max_concurrency} at once (max_concurrency) and "
            f"{limits.queue_limit} waiting (queue_limit). Send fewer prompts, or a smaller n."
        )
        return RequestError(400, message, param="n", code="too_many_answers")

    def wait_until_idle(self, timeout_seconds: float) -> bool:
        """Wait until no request is running or queued; return whether that happened in time."""
        with self.changed:
            return self.changed.wait_for(lambda: self.is_idle, timeout_seconds)


class GenerationEngine(Protocol):
    """Engine interface: ``run`` blocks its own thread, the HTTP thread calls the rest."""

    @property
    def limits(self) -> Limits:
        """Return the engine's capacity limits."""

    @property
    def step_began_at(self) -> float | None:
        """Return when the current step began, or None while no step runs."""

    @property
    def is_idle(self) -> bool:
        """Return whether no request is running or queued."""

    def admit(self, answers: int) -> None:
        """Check that the engine or its queue has room for a request, before its body is read.

        Raises:
            QueueFullError: the queue is full.
            EngineEndedError: the engine has failed or was stopped.
        """

    def cancel(self, sequences: Sequence[Pending]) -> None:
        """Cancel answers whose client has disconnected."""

    def wait_until_idle(self, timeout_seconds: float) -> bool:
        """Wait until no request is running or queued; return whether that happened in time."""

    def close(self) -> None:
        """Stop the engine; unfinished answers end with an error."""

    def run(self) -> None:
        """Generate answers until the engine is closed.

        Raises:
            EngineProcessError: its process exited by itself; it may be restarted.
        """


class ServingModel(Protocol):
    """A loaded model that accepts requests: its tokenizer and its engine."""

    @property
    def engine(self) -> GenerationEngine:
        """Return the engine."""

    @property
    def vocabulary(self) -> int:
        """Return the number of token ids."""

    async def prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Return a prompt's token ids; ids sent by the client are validated.

        Raises:
            RequestError: a token id is outside the vocabulary.
        """

    @property
    def template(self) -> str:
        """Return the text of the chat template; "" without one."""

    async def chat_ids(
        self, messages: Sequence[Turn], tools: Sequence[dict[str, Any]] | None = None
    ) -> list[int]:
        """Return the token ids of a conversation, with the tools on offer.

        Raises:
            TemplateRefusedError: the chat template rejects these messages.
        """

    def token_text(self, token: int) -> str:
        """Return the text of a single token."""

    @property
    def constraint_refusal(self) -> str:
        """Return why no answer is held to a schema or to calls; "": they are."""

    async def check_constraint(self, constraint: Constraint) -> None:
        """Check that answers can be held to a constraint.

        Raises:
            RequestError: a schema of it cannot be held to; the error names the field.
        """

    def submit(self, requests: Sequence[GenerationRequest]) -> Sequence[Pending]:
        """Queue all answers of one HTTP request.

        Raises:
            QueueFullError: the queue is full.
            EngineEndedError: the engine has failed or was stopped.
        """


@runtime_checkable
class EmbeddingModel(ServingModel, Protocol):
    """A model whose engine gives embeddings of texts, if the model is made for that."""

    @property
    def embedding_refusal(self) -> str:
        """Return why the model gives no embeddings; "": it does."""

    def submit_texts(
        self, texts: Sequence[Sequence[int]], deliver: Delivered
    ) -> Sequence[Pending]:
        """Queue the texts of one request, as tokens.

        Raises:
            QueueFullError: the queue is full.
            EngineEndedError: the engine has failed or was stopped.
        """


class Answer(Protocol):
    """One request while it is answered, by any engine.

    Closing the events, or cancelling ``whole``, cancels the request.
    """

    @property
    def model(self) -> str:
        """Return the model name in the request."""

    @property
    def is_streamed(self) -> bool:
        """Return whether the client wants events."""

    @property
    def used(self) -> TokensUsed:
        """Return the tokens so far, at most as many as were delivered by then."""

    async def whole(self) -> bytes:
        """Return the JSON document of the whole answer.

        Raises:
            QueueFullError: the queue is full.
            EngineEndedError: the engine has failed or was stopped.
            RequestError: the engine rejects the request, or ended while it answered.
        """

    def events(self) -> AsyncGenerator[bytes]:
        """Yield the answer's server-sent events, each with the blank line that ends it.

        Raises:
            QueueFullError: the queue is full.
            EngineEndedError: the engine has failed or was stopped.
            RequestError: the engine rejects the request, or ended while it answered.
        """


@runtime_checkable
class ForwardingModel(Protocol):
    """A model whose engine has an OpenAI API itself: requests are forwarded to it."""

    @property
    def engine(self) -> GenerationEngine:
        """Return the engine."""

    @property
    def template(self) -> str:
        """Return the text of the model's chat template; "" without one."""

    @property
    def calls_refusal(self) -> str:
        """Return why a call that the model may choose is not read; "": it is."""

    def forwarded_request(self, path: str, body: bytes, *, is_counted: bool) -> Answer:
        """Return the parsed request, not yet sent to the engine; ``used`` needs ``is_counted``.

        Raises:
            RequestError: a field is invalid; the error names it.
        """

    @property
    def ranking_refusal(self) -> str:
        """Return why the model ranks no documents; "": it does."""

    async def rank(self, model: str, document: dict[str, Any]) -> dict[str, Any]:
        """Return the engine's ranking of documents by a query.

        Raises:
            QueueFullError: the queue is full.
            EngineEndedError: the engine has failed or was stopped.
            RequestError: the engine rejects the request, or is down.
        """

    async def count_tokens(self, document: dict[str, Any]) -> int:
        """Return the prompt tokens of a conversation in the form of Anthropic's count request.

        Raises:
            RequestError: the engine rejects the request, or is down.
        """


# Limits on request length and cache size; the same for every engine.


USUAL_TOKENS = 2048  # of a request, if neither the model nor the spec has a limit


def longest_request(known: int | None, spec: ServeSpec) -> int:
    """Return the longest request, prompt and answer; ``known``: the model's position count.

    Raises:
        BadInputError: the spec's length exceeds the model's positions.
    """
    if spec.max_length is None:
        return int(known or USUAL_TOKENS)
    if known and spec.max_length > known:
        msg = (
            f"max_length is {spec.max_length}, but the model has {known} positions; "
            f"choose at most {known}"
        )
        raise BadInputError(msg)
    return spec.max_length


def check_room(tokens: int, longest: int) -> None:
    """Check that the cache holds one request of maximum length.

    Raises:
        BadInputError: the cache is too small.
    """
    if tokens < longest:
        msg = (
            f"kv_cache_tokens is {tokens}, less than one request of {longest} tokens; give more, "
            "or set a shorter max_length"
        )
        raise BadInputError(msg)
