"""Convert llama.cpp's completion events to stream chunks."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runners.endpoint_spec import NO_ADAPTER
from runners.jobs.serve.contract import (
    Choice,
    FinishReason,
    GenerationRequest,
    Pending,
    Sampling,
    StreamChunk,
    TokenLogprob,
)

Event = Mapping[str, Any]


def completion_body(wish: GenerationRequest, *, has_adapters: bool) -> dict[str, Any]:
    """Return the body for llama.cpp's ``/completion``, with its other samplers switched off.

    An adapter that is not named has no effect; with adapters loaded, one has to be named.
    """
    sampling = wish.sampling
    body: dict[str, Any] = {
        "prompt": list(wish.prompt),
        "n_predict": sampling.max_tokens,
        "stop": list(sampling.stops),
        "stream": True,
        "ignore_eos": sampling.ignore_eos,
        "return_tokens": True,
        "cache_prompt": True,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "n_probs": _num_logprobs(sampling),
    }
    if has_adapters:
        is_base = wish.adapter == NO_ADAPTER
        body["lora"] = [{"id": max(0, wish.adapter), "scale": 0.0 if is_base else 1.0}]
    return body if sampling.seed is None else {**body, "seed": sampling.seed % 2**32}


def _num_logprobs(sampling: Sampling) -> int:
    return 0 if sampling.top_logprobs is None else max(1, sampling.top_logprobs)


@dataclass(eq=False)
class Answer(Pending):
    """One answer that is being received."""

    wish: GenerationRequest
    is_over: bool = False
    num_written: int = 0
    texts: dict[int, str] = field(default_factory=dict)  # token texts as llama.cpp reported them
    _at: int = 0  # offset of the next token's text

    def take(self, event: Event) -> int:
        """Deliver the chunk of an event and return the number of new tokens."""
        text = str(event.get("content", ""))
        before = self.num_written
        self.num_written = max(before, int(event.get("tokens_predicted", before)))
        reason = _reason(event) if event.get("stop") else None
        logprobs = self._token_logprobs(event.get("completion_probabilities") or ())
        self.is_over = reason is not None
        if text or logprobs or reason:
            self.wish.deliver(StreamChunk(text, logprobs, reason, self.num_written))
        return self.num_written - before

    def fail(self) -> None:
        """Deliver an error unless the answer is complete."""
        if not self.is_over:
            self.is_over = True
            self.wish.deliver(StreamChunk(finish_reason="error"))

    def touch(self) -> float:
        """Return the seconds since the last token, and reset the clock."""
        now = time.perf_counter()
        elapsed = now - (self.last_at or self.asked_at)
        self.last_at = now
        return elapsed

    def _token_logprobs(self, probabilities: Sequence[Event]) -> list[TokenLogprob]:
        if self.wish.sampling.top_logprobs is None:
            return []
        logprobs = []
        for each in probabilities:
            top = each.get("top_logprobs") or ()
            for alternative in (each, *top):
                self.texts[int(alternative["id"])] = str(alternative["token"])
            pairs = [
                (int(alternative["id"]), float(alternative["logprob"])) for alternative in top
            ]
            reported = tuple(pairs[: self.wish.sampling.top_logprobs])
            logprobs.append(
                TokenLogprob(Choice(int(each["id"]), float(each["logprob"]), reported), self._at)
            )
            self._at += len(str(each["token"]))
        return logprobs


def _reason(event: Event) -> FinishReason:
    return "length" if event.get("stop_type") == "limit" else "stop"
