"""The model of an endpoint: loaded, its cache reserved, read both ways once, then served."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from runners.jobs.generate.packed import check_packable
from runners.jobs.loading import (
    LoadedModel,
    end_ids,
    load_model,
    preload_library,
    require_tokenizer,
)
from runners.jobs.memory import model_bytes, terms_held
from runners.jobs.mixed_adapters import hung_on
from runners.jobs.runtime import Job
from runners.jobs.serve.contract import Limits, Wish
from runners.jobs.serve.engine import Engine, Reply
from runners.jobs.serve.figures import Figures
from runners.jobs.serve.lengths import USUAL_TOKENS, check_room, longest_request
from runners.jobs.serve.paging import CHECK_TOKENS, PagedCache, check_paging, pages_for
from runners.jobs.serve.protocol import known_ids
from runners.jobs.serve.text import Reader
from runners.jobspec import ServeSpec


@dataclass(frozen=True)
class LoadedReady:
    """A loaded model: its engine, and its tokenizer, which one thread uses at a time."""

    engine: Engine
    reader: Reader
    vocabulary: int
    _lock: threading.Lock = field(default_factory=threading.Lock)

    async def prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Return a prompt's tokens, checked where the client sent tokens.

        Raises:
            AskedError: the model has no such token.
        """
        if isinstance(prompt, str):
            return await asyncio.to_thread(self._prompt_ids, prompt)
        return known_ids(prompt, self.vocabulary)

    async def chat_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return a conversation's tokens.

        Raises:
            TemplateRefusedError: the template takes no such messages.
        """
        return await asyncio.to_thread(self._chat_ids, messages)

    def _prompt_ids(self, text: str) -> list[int]:
        with self._lock:
            return self.reader.prompt_ids(text)

    def _chat_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        with self._lock:
            return self.reader.chat_ids(messages)

    def token_text(self, token: int) -> str:
        """Return the text of one token alone."""
        return self.reader.token_text(token)

    def ask(self, wishes: Sequence[Wish]) -> Sequence[Reply]:
        """Have the answers of one request written.

        Raises:
            QueueFullError: too many wait already.
            EngineEndedError: it has ended, by a fault or because it was told to.
        """
        replies = [
            Reply(prompt, sampling, self.reader.answer(sampling.stops), deliver, adapter)
            for prompt, sampling, deliver, adapter in wishes
        ]
        self.engine.submit(replies)
        return replies


def load_ready(job: Job, spec: ServeSpec, figures: Figures) -> LoadedReady:
    """Return the loaded model.

    Raises:
        BadInputError: it cannot be served, or not as long as asked.
        MissingModelError: it is not there, or reads no text.
    """
    preload_library(spec.weight_dtype)
    loaded = load_model(job, spec.model, spec.weight_dtype)
    tokenizer = require_tokenizer(loaded, "an endpoint")
    check_packable(loaded.model)
    longest = _max_length(loaded, spec)
    cache = PagedCache(pages_for(_cache_tokens(spec, longest)))
    vocabulary = int(loaded.model.config.get_text_config().vocab_size)
    check_paging(loaded.model, cache, vocabulary)
    held = {"weights": model_bytes(loaded.model), "kv_cache": cache.bytes}
    adapters = hung_on(loaded.model, spec.model, spec.adapters, job.host_dir)
    if adapters is not None:
        held["adapters"] = adapters.bytes
    job.emitter.metric(terms_held(held))
    limits = Limits(
        spec.max_concurrency, spec.queue_limit, longest, end_ids(loaded), spec.max_batch_tokens
    )
    engine = Engine(loaded.model, cache, limits, figures, adapters)
    return LoadedReady(engine, Reader(tokenizer), vocabulary)


def _max_length(loaded: LoadedModel, spec: ServeSpec) -> int:
    """Return the most tokens of prompt and answer together."""
    known = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    return longest_request(known, spec)


def _cache_tokens(spec: ServeSpec, longest: int) -> int:
    """Return for how many tokens pages are reserved: at least one request at its longest."""
    usual = spec.max_concurrency * min(longest, USUAL_TOKENS)
    asked = spec.kv_cache_tokens or max(usual, longest)
    check_room(asked, longest)
    return max(asked, CHECK_TOKENS)
