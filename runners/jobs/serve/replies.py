"""OpenAI response documents: whole answers, stream chunks and logprobs of both APIs."""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from runners.jobs.serve.contract import UNFINISHED, FinishReason, StreamChunk, TokenLogprob

Document = dict[str, Any]


@dataclass
class Written:
    """The text, logprobs and token count of one answer so far."""

    text: str = ""
    told: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    output_tokens: int = 0

    def add(self, piece: StreamChunk) -> None:
        """Append a chunk."""
        self.text += piece.text
        self.told += piece.logprobs
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
    """The response format of one API: documents, chunks and logprobs."""

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
        """Return the document of complete answers."""
        choices = [self._choice(index, each) for index, each in enumerate(written)]
        return {**self._head(self.whole), "choices": choices, "usage": used}

    def opening(self, _index: int) -> Document | None:
        """Return the chunk before the first text, if the API has one."""
        return None

    def part(self, index: int, piece: StreamChunk) -> Document:
        """Return the document of a stream chunk."""
        return {**self._head(self.chunk), "choices": [self._part(index, piece)]}

    def closing(self, used: Document) -> Document:
        """Return the chunk with the token counts."""
        return {**self._head(self.chunk), "choices": [], "usage": used}

    def _head(self, kind: str) -> Document:
        return {"id": self._id, "object": kind, "created": self._created, "model": self.model}

    def _choice(self, index: int, written: Written) -> Document:
        raise NotImplementedError

    def _part(self, index: int, chunk: StreamChunk) -> Document:
        raise NotImplementedError


class CompletionForm(Form):
    """``/v1/completions``: plain text after a prompt."""

    prefix = "cmpl"
    whole = chunk = "text_completion"

    def _choice(self, index: int, written: Written) -> Document:
        return {
            "index": index,
            "text": written.text,
            "logprobs": self._logprobs(written.told),
            "finish_reason": written.finish_reason,
        }

    def _part(self, index: int, chunk: StreamChunk) -> Document:
        return {
            "index": index,
            "text": chunk.text,
            "logprobs": self._logprobs(chunk.logprobs),
            "finish_reason": chunk.finish_reason,
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> Document | None:
        if not self.has_logprobs:
            return None
        return {
            "tokens": [self.token_text(each.choice.token) for each in logprobs],
            "token_logprobs": [each.choice.logprob for each in logprobs],
            "top_logprobs": [
                {self.token_text(token): logprob for token, logprob in each.choice.top}
                for each in logprobs
            ],
            "text_offset": [each.at for each in logprobs],
        }


class ChatForm(Form):
    """``/v1/chat/completions``."""

    prefix = "chatcmpl"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def opening(self, index: int) -> Document | None:
        """Return the chunk that states the assistant's role."""
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

    def _part(self, index: int, chunk: StreamChunk) -> Document:
        return {
            "index": index,
            "delta": {"content": chunk.text} if chunk.text else {},
            "logprobs": self._logprobs(chunk.logprobs),
            "finish_reason": chunk.finish_reason,
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> Document | None:
        if not self.has_logprobs:
            return None
        return {"content": [self._logprob_document(each) for each in logprobs], "refusal": None}

    def _logprob_document(self, entry: TokenLogprob) -> Document:
        top = [self._token_document(token, logprob) for token, logprob in entry.choice.top]
        return {
            **self._token_document(entry.choice.token, entry.choice.logprob),
            "top_logprobs": top,
        }

    def _token_document(self, token: int, logprob: float | None) -> Document:
        text = self.token_text(token)
        utf8_bytes = None if UNFINISHED in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": utf8_bytes}
