"""What llama.cpp sends while it writes one answer, in the words of our door."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runners.endpoint_spec import NO_ADAPTER
from runners.jobs.serve.contract import Choice, FinishReason, Pending, Piece, Sampling, Told, Wish

Event = Mapping[str, Any]


def asked_of(wish: Wish, *, has_adapters: bool) -> dict[str, Any]:
    """Return the body for llama.cpp's ``/completion``: no sampler of its own beside ours.

    An adapter that is not named has no effect; where there are some, something is to be named.
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
        "top_k": 0,
        "min_p": 0.0,
        "repeat_penalty": 1.0,
        "n_probs": _num_told(sampling),
    }
    if has_adapters:
        is_base = wish.adapter == NO_ADAPTER
        body["lora"] = [{"id": max(0, wish.adapter), "scale": 0.0 if is_base else 1.0}]
    return body if sampling.seed is None else {**body, "seed": sampling.seed % 2**32}


def _num_told(sampling: Sampling) -> int:
    return 0 if sampling.top_logprobs is None else max(1, sampling.top_logprobs)


@dataclass(eq=False)
class Answer(Pending):
    """One answer as it comes in."""

    wish: Wish
    is_over: bool = False
    num_written: int = 0
    texts: dict[int, str] = field(default_factory=dict)  # of tokens, as llama.cpp wrote them
    _at: int = 0  # where the text of the next token begins

    def take(self, event: Event) -> int:
        """Deliver what an event brings and return how many tokens are new."""
        text = str(event.get("content", ""))
        before = self.num_written
        self.num_written = max(before, int(event.get("tokens_predicted", before)))
        reason = _reason(event) if event.get("stop") else None
        told = self._told(event.get("completion_probabilities") or ())
        self.is_over = reason is not None
        if text or told or reason:
            self.wish.deliver(Piece(text, told, reason, self.num_written))
        return self.num_written - before

    def fail(self) -> None:
        """Tell that no more comes."""
        if not self.is_over:
            self.is_over = True
            self.wish.deliver(Piece(finish_reason="error"))

    def touch(self) -> float:
        """Return the seconds since its last token, and count from now."""
        now = time.perf_counter()
        since = now - (self.last_at or self.asked_at)
        self.last_at = now
        return since

    def _told(self, probabilities: Sequence[Event]) -> list[Told]:
        if self.wish.sampling.top_logprobs is None:
            return []
        found = []
        for each in probabilities:
            top = each.get("top_logprobs") or ()
            for known in (each, *top):
                self.texts[int(known["id"])] = str(known["token"])
            pairs = [(int(known["id"]), float(known["logprob"])) for known in top]
            wanted = tuple(pairs[: self.wish.sampling.top_logprobs])
            found.append(Told(Choice(int(each["id"]), float(each["logprob"]), wanted), self._at))
            self._at += len(str(each["token"]))
        return found


def _reason(event: Event) -> FinishReason:
    return "length" if event.get("stop_type") == "limit" else "stop"
