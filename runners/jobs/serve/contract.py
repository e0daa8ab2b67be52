"""What an endpoint's door and whatever writes its answers agree on; without torch."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from runners.endpoint_spec import NO_ADAPTER
from runners.jobs.serve.asgi import Receive, Send

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # a character whose last bytes are still to come

FinishReason = Literal["stop", "length", "error"]


class QueueFullError(Exception):
    """As many requests wait as may."""


class EngineEndedError(Exception):
    """The engine answers no more."""


class EngineLostError(Exception):
    """The engine is a process of its own, and it ended by itself or does not answer."""


class TemplateRefusedError(Exception):
    """The model's chat template refuses these messages; the text is its own."""


@dataclass(frozen=True)
class Sampling:
    """How one answer is written, and what is told of it."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stops: tuple[str, ...] = ()
    top_logprobs: int | None = None  # alternatives told beside each token; None: no logprobs
    ignore_eos: bool = False


@dataclass(frozen=True)
class Choice:
    """A chosen token, its logarithmic probability before temperature, and the likeliest ones."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Told:
    """One token of an answer as logprobs tell it; ``at`` is where its text begins."""

    choice: Choice
    at: int


@dataclass(frozen=True)
class Piece:
    """What came of an answer since the last piece."""

    text: str = ""
    told: Sequence[Told] = ()
    finish_reason: FinishReason | None = None
    output_tokens: int = 0  # in all


class Wish(NamedTuple):
    """One answer that is asked for, and who takes its pieces."""

    prompt: Sequence[int]
    sampling: Sampling
    deliver: Callable[[Piece], None]
    adapter: int = NO_ADAPTER  # its number


@dataclass(eq=False)
class Pending:
    """One answer being written, whoever writes it."""

    is_cancelled: bool = field(default=False, kw_only=True)
    asked_at: float = field(default_factory=time.perf_counter, kw_only=True)
    last_at: float = field(default=0.0, kw_only=True)


@dataclass(frozen=True)
class Limits:
    """How much the engine takes on."""

    max_concurrency: int
    queue_limit: int
    max_length: int
    end_ids: frozenset[int]
    step_tokens: int = 512  # prompts are read in pieces of so many, beside what is decoding


class Writer(Protocol):
    """What writes answers: asked from the door's thread, running in another one."""

    @property
    def limits(self) -> Limits:
        """Return how much it takes on."""

    @property
    def step_began_at(self) -> float | None:
        """Return since when it computes without a word, or None while it computes nothing."""

    @property
    def is_idle(self) -> bool:
        """Return whether nobody is answered and nobody waits."""

    def cancel(self, sequences: Sequence[Pending]) -> None:
        """Let answers go that nobody waits for."""

    def wait_until_idle(self, timeout_seconds: float) -> bool:
        """Wait until nobody is answered and nobody waits; return whether it came to that."""

    def close(self) -> None:
        """Let it end; whoever is still being answered hears of it."""

    def run(self) -> None:
        """Answer until it is closed.

        Raises:
            EngineLostError: its process ended by itself; a new one may be started.
        """


class Ready(Protocol):
    """A model that can be asked: its tokens, and who writes."""

    @property
    def engine(self) -> Writer:
        """Return who writes."""

    async def prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Return a prompt's tokens, checked where the client sent tokens.

        Raises:
            AskedError: the model has no such token.
        """

    async def chat_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return a conversation's tokens.

        Raises:
            TemplateRefusedError: the template takes no such messages.
        """

    def token_text(self, token: int) -> str:
        """Return the text of one token alone."""

    def ask(self, wishes: Sequence[Wish]) -> Sequence[Pending]:
        """Have the answers of one request written.

        Raises:
            QueueFullError: too many wait already.
            EngineEndedError: it has ended, by a fault or because it was told to.
        """


class Handing(Protocol):
    """A request that is handed on as the client wrote it."""

    @property
    def model(self) -> str:
        """Return the name that the client asks for."""

    async def run(self, receive: Receive, send: Send) -> None:
        """Hand it on, and its answer back as it comes.

        Raises:
            AskedError: too many wait already, or the engine refuses it or is gone.
            ClientGoneError: nobody waits any more.
        """


@runtime_checkable
class Relay(Protocol):
    """A model whose engine speaks OpenAI's form itself: what is asked is handed on to it."""

    @property
    def engine(self) -> Writer:
        """Return who writes."""

    def handing(self, path: str, body: bytes) -> Handing:
        """Return the request of a body.

        Raises:
            AskedError: what is wrong with which field.
        """
