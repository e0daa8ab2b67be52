"""Answers in OpenAI's form: whole documents, chunks of a stream, logprobs of both forms."""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from runners.jobs.serve.contract import UNFINISHED, FinishReason, Piece, Told

Document = dict[str, Any]


@dataclass
class Written:
    """All of one answer."""

    text: str = ""
    told: list[Told] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    output_tokens: int = 0

    def add(self, piece: Piece) -> None:
        """Take in what came."""
        self.text += piece.text
        self.told += piece.told
        self.finish_reason = piece.finish_reason
        self.output_tokens = max(self.output_tokens, piece.output_tokens)


def usage(prompt_tokens: int, output_tokens: int) -> Document:
    """Return the token counts of a request."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
    }


class Form:
    """One of the two forms: how documents, chunks and logprobs look there."""

    prefix = ""
    whole = ""
    chunk = ""

    def __init__(
        self, model: str, token_text: Callable[[int], str], *, has_logprobs: bool
    ) -> None:
        self.model = model
        self.token_text = token_text
        self.has_logprobs = has_logprobs
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def document(self, written: Sequence[Written], used: Document) -> Document:
        """Return the whole answer."""
        choices = [self._choice(index, each) for index, each in enumerate(written)]
        return {**self._head(self.whole), "choices": choices, "usage": used}

    def opening(self, _index: int) -> Document | None:
        """Return the chunk before the first text, where the form has one."""
        return None

    def part(self, index: int, piece: Piece) -> Document:
        """Return the chunk of a piece."""
        return {**self._head(self.chunk), "choices": [self._part(index, piece)]}

    def closing(self, used: Document) -> Document:
        """Return the chunk of the token counts."""
        return {**self._head(self.chunk), "choices": [], "usage": used}

    def _head(self, kind: str) -> Document:
        return {"id": self._id, "object": kind, "created": self._created, "model": self.model}

    def _choice(self, index: int, written: Written) -> Document:
        raise NotImplementedError

    def _part(self, index: int, piece: Piece) -> Document:
        raise NotImplementedError


class CompletionForm(Form):
    """The older form: plain text after a prompt."""

    prefix = "cmpl"
    whole = chunk = "text_completion"

    def _choice(self, index: int, written: Written) -> Document:
        return {
            "index": index,
            "text": written.text,
            "logprobs": self._logprobs(written.told),
            "finish_reason": written.finish_reason,
        }

    def _part(self, index: int, piece: Piece) -> Document:
        return {
            "index": index,
            "text": piece.text,
            "logprobs": self._logprobs(piece.told),
            "finish_reason": piece.finish_reason,
        }

    def _logprobs(self, told: Sequence[Told]) -> Document | None:
        if not self.has_logprobs:
            return None
        return {
            "tokens": [self.token_text(each.choice.token) for each in told],
            "token_logprobs": [each.choice.logprob for each in told],
            "top_logprobs": [
                {self.token_text(token): logprob for token, logprob in each.choice.top}
                for each in told
            ],
            "text_offset": [each.at for each in told],
        }


class ChatForm(Form):
    """The form of conversations."""

    prefix = "chatcmpl"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def opening(self, index: int) -> Document | None:
        """Return the chunk that says whose turn it is."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self._head(self.chunk), "choices": [choice]}

    def _choice(self, index: int, written: Written) -> Document:
        return {
            "index": index,
            "message": {"role": "assistant", "content": written.text, "refusal": None},
            "logprobs": self._logprobs(written.told),
            "finish_reason": written.finish_reason,
        }

    def _part(self, index: int, piece: Piece) -> Document:
        return {
            "index": index,
            "delta": {"content": piece.text} if piece.text else {},
            "logprobs": self._logprobs(piece.told),
            "finish_reason": piece.finish_reason,
        }

    def _logprobs(self, told: Sequence[Told]) -> Document | None:
        if not self.has_logprobs:
            return None
        return {"content": [self._token(each) for each in told], "refusal": None}

    def _token(self, told: Told) -> Document:
        top = [self._named(token, logprob) for token, logprob in told.choice.top]
        return {**self._named(told.choice.token, told.choice.logprob), "top_logprobs": top}

    def _named(self, token: int, logprob: float | None) -> Document:
        text = self.token_text(token)
        known = None if UNFINISHED in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": known}
