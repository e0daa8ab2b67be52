"""The endpoint job of Slipway's own engine: a transformers model with paged attention."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerFast

from runners.jobs.adapters import attach_adapters
from runners.jobs.chat_template import template_fault, template_warning
from runners.jobs.loading import (
    HOW_QUANTISED,
    end_ids,
    load_model,
    pick_device,
    preload_library,
    require_tokenizer,
)
from runners.jobs.memory import PeakMeter, model_bytes, terms_held
from runners.jobs.runtime import Job, job_telemetry, prepare_compiler
from runners.jobs.serve.constraints import Constraint
from runners.jobs.serve.contract import (
    USUAL_TOKENS,
    Delivered,
    GenerationRequest,
    Limits,
    ServingModel,
    Turn,
    check_room,
    longest_request,
)
from runners.jobs.serve.endpoint import PeakUsage, serve
from runners.jobs.serve.engine import AnswerSequence, EmbeddedText, Engine
from runners.jobs.serve.figures import EndpointMetrics
from runners.jobs.serve.grammars import GrammarError, Grammars
from runners.jobs.serve.openai_requests import checked_token_ids, schema_error
from runners.jobs.serve.padded_decode import prepared_decode
from runners.jobs.serve.paging import (
    CHECK_TOKENS,
    PagedCache,
    check_layers,
    check_paging,
    pages_for,
)
from runners.jobs.serve.pooling import UnpooledError, pooling_of
from runners.jobs.serve.text import RequestTokenizer
from runners.jobs.weights import first_line
from runners.jobspec import ServeSpec


@dataclass(frozen=True)
class TransformersServingModel:
    """A loaded model: its engine and its tokenizer; the lock serialises tokenizer calls."""

    engine: Engine
    reader: RequestTokenizer
    vocabulary: int
    grammars: Grammars | None = None  # None: its tokenizer cannot be read
    constraint_refusal: str = ""
    embedding_refusal: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    async def prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Return a prompt's token ids; ids sent by the client are validated.

        Raises:
            RequestError: a token id is outside the vocabulary.
        """
        if isinstance(prompt, str):
            return await asyncio.to_thread(self._prompt_ids, prompt)
        return checked_token_ids(prompt, self.vocabulary)

    @property
    def template(self) -> str:
        """Return the text of the chat template; "" without one."""
        return self.reader.template

    async def chat_ids(
        self, messages: Sequence[Turn], tools: Sequence[dict[str, Any]] | None = None
    ) -> list[int]:
        """Return the token ids of a conversation, with the tools on offer.

        Raises:
            TemplateRefusedError: the chat template rejects these messages.
        """
        return await asyncio.to_thread(self._chat_ids, messages, tools)

    def _prompt_ids(self, text: str) -> list[int]:
        with self._lock:
            return self.reader.prompt_ids(text)

    def _chat_ids(
        self, messages: Sequence[Turn], tools: Sequence[dict[str, Any]] | None
    ) -> list[int]:
        with self._lock:
            return self.reader.chat_ids(messages, tools)

    def token_text(self, token: int) -> str:
        """Return the text of a single token."""
        return self.reader.token_text(token)

    async def check_constraint(self, constraint: Constraint) -> None:
        """Check that answers can be held to a constraint, whose grammar is then kept.

        Raises:
            RequestError: a schema of it cannot be held to; the error names the field.
        """
        if self.grammars is None:
            return
        try:
            await asyncio.to_thread(self.grammars.compile, constraint)
        except GrammarError as error:
            raise schema_error(error.part, str(error)) from None

    def submit(self, requests: Sequence[GenerationRequest]) -> Sequence[AnswerSequence]:
        """Queue all answers of one HTTP request.

        Raises:
            QueueFullError: the queue is full.
            EngineEndedError: the engine has failed or was stopped.
        """
        replies = [self._reply(each) for each in requests]
        self.engine.submit(replies)
        return replies

    def submit_texts(
        self, texts: Sequence[Sequence[int]], deliver: Delivered
    ) -> list[EmbeddedText]:
        """Queue the texts of one request, as tokens, for their embeddings.

        Raises:
            QueueFullError: the queue is full.
            EngineEndedError: the engine has failed or was stopped.
        """
        found = [EmbeddedText(tokens, partial(deliver, at)) for at, tokens in enumerate(texts)]
        self.engine.submit_texts(found)
        return found

    def _reply(self, request: GenerationRequest) -> AnswerSequence:
        prompt, sampling, deliver, adapter = request
        answer = self.reader.answer(sampling.stops, sampling.shown_tokens)
        matcher = None
        if sampling.constraint is not None and self.grammars is not None:
            matcher = self.grammars.matcher(sampling.constraint)
        return AnswerSequence(prompt, sampling, answer, deliver, adapter, matcher)


def load_serving_model(
    job: Job, spec: ServeSpec, figures: EndpointMetrics
) -> TransformersServingModel:
    """Return the loaded model.

    Raises:
        BadInputError: the model cannot be served, or not with the requested length.
        MissingModelError: the model does not exist, or has no tokenizer.
    """
    preload_library(spec.weight_dtype)
    loaded = load_model(job, spec.model, spec.weight_dtype)
    tokenizer = require_tokenizer(loaded, "an endpoint")
    reader = RequestTokenizer(tokenizer)
    if fault := template_fault(reader.chat_ids):
        job.emitter.log(template_warning(fault))
    check_layers(loaded.model)
    model_positions = getattr(
        loaded.model.config.get_text_config(), "max_position_embeddings", None
    )
    longest = longest_request(model_positions, spec)
    cache = PagedCache(pages_for(_cache_tokens(spec, longest)))
    vocabulary = int(loaded.model.config.get_text_config().vocab_size)
    grammars, refused = _grammars(tokenizer, vocabulary, end_ids(loaded))
    if refused:
        job.emitter.log(refused)
    check_paging(loaded.model, cache, vocabulary)
    sizes = {"weights": model_bytes(loaded.model), "kv_cache": cache.bytes}
    adapters = attach_adapters(loaded.model, spec.model, spec.adapters, job.host_dir)
    if adapters is not None:
        sizes["adapters"] = adapters.bytes
    limits = Limits(
        spec.max_concurrency, spec.queue_limit, longest, end_ids(loaded), spec.max_batch_tokens
    )
    decode = None
    # Without a graph padding only costs time.
    if loaded.model.device.type == "cuda" and not spec.enforce_eager:
        fuses = prepare_compiler(job.scratch_dir() / "kernels")
        decode = prepared_decode(loaded.model, cache, limits, job.emitter.log, fuses=fuses)
    if decode is not None:
        sizes["buffers"] = decode.bytes
    job.emitter.metric(terms_held(sizes))
    try:
        pooling, unpooled = pooling_of(spec.model, job.host_dir, loaded.model), ""
    except UnpooledError as error:
        pooling, unpooled = None, str(error)
    engine = Engine(loaded.model, cache, limits, figures, adapters, decode, pooling)
    return TransformersServingModel(engine, reader, vocabulary, grammars, refused, unpooled)


def _grammars(
    tokenizer: PreTrainedTokenizerFast, vocabulary: int, ends: frozenset[int]
) -> tuple[Grammars | None, str]:
    """Return the grammars of a tokenizer, or why there are none."""
    try:
        return Grammars(tokenizer, vocabulary, sorted(ends)), ""
    except Exception as error:  # noqa: BLE001 - the library has no class of its own
        return None, f"no answer is held to a grammar: {first_line(error)}"


def _cache_tokens(spec: ServeSpec, longest: int) -> int:
    """Return the cache size in tokens: at least one request of maximum length."""
    default = spec.max_concurrency * min(longest, USUAL_TOKENS)
    requested = spec.kv_cache_tokens or max(default, longest)
    check_room(requested, longest)
    return max(requested, CHECK_TOKENS)


class OwnBackend:
    """Serves a transformers model in this process."""

    def __init__(self) -> None:
        self.meter = PeakMeter(pick_device())

    def load(self, job: Job, spec: ServeSpec, figures: EndpointMetrics) -> ServingModel:
        """Return the loaded model.

        Raises:
            BadInputError: the model cannot be served, or not with the requested length.
        """
        return load_serving_model(job, spec, figures)

    def peak_usage(self) -> PeakUsage:
        """Return the peak memory since before the model was loaded."""
        peak = self.meter.read()
        return PeakUsage(peak.bytes, peak.how, str(pick_device()))

    def command_line(self) -> str:
        """Return nothing: the engine runs in the job's own process."""
        return ""

    def notes(self, spec: ServeSpec) -> dict[str, str]:
        """Return how the weights were quantised, if they were."""
        how = HOW_QUANTISED.get(spec.weight_dtype)
        return {"weight_dtype": how} if how else {}


def work(job: Job) -> None:
    """Run one endpoint attempt."""
    with job_telemetry(job):
        serve(job, OwnBackend())
