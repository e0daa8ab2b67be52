"""Tokenisation of prompts, and incremental detokenisation of answers with stop strings."""

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions untyped.
from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerFast

from runners.jobs.chat_template import num_repeated_bos, rendered_chat
from runners.jobs.serve.contract import UNFINISHED, Choice, TokenLogprob


@dataclass
class IncrementalDetokenizer:
    """Incremental text of one answer: whole characters, cut at a stop string."""

    tokenizer: PreTrainedTokenizerFast
    stops: Sequence[str] = ()
    ids: list[int] = field(default_factory=list)
    stopped_by: str | None = None  # the stop string that ended the answer
    _num_returned: int = 0  # characters returned so far
    _held: str = ""  # characters that may begin a stop string
    _logprobs: list[TokenLogprob] = field(default_factory=list)
    _before: int = 0  # tokens from here on are decoded together: their texts depend on each other
    _read: int = 0

    def add_token(self, choice: Choice) -> tuple[str, list[TokenLogprob]]:
        """Add a token; return the text and the logprobs that are final now."""
        self.ids.append(choice.token)
        self._logprobs.append(TokenLogprob(choice, self._num_returned + len(self._held)))
        self._held += self._new_text()
        cuts = [(at, each) for each in self.stops if (at := self._held.find(each)) >= 0]
        if cuts:
            at, self.stopped_by = min(cuts, key=lambda cut: cut[0])
            self._held = self._held[:at]
            return self._release(len(self._held))
        return self._release(len(self._held) - self._partial_stop_length())

    def finish(self) -> tuple[str, list[TokenLogprob]]:
        """Return the remaining text and logprobs of an answer that ends without a stop string."""
        if self.stopped_by is not None:
            return "", []
        self._held += self._decoded(self._before)[len(self._decoded(self._before, self._read)) :]
        text, certain = self._held, self._logprobs
        self._held, self._logprobs = "", []
        return text, certain

    def _new_text(self) -> str:
        old, whole = self._decoded(self._before, self._read), self._decoded(self._before)
        if len(whole) <= len(old) or whole.endswith(UNFINISHED):
            return ""
        self._before, self._read = self._read, len(self.ids)
        return whole[len(old) :]

    def _decoded(self, begin: int, end: int | None = None) -> str:
        return str(self.tokenizer.decode(self.ids[begin:end], skip_special_tokens=True))

    def _partial_stop_length(self) -> int:
        """Return how many of the last characters may begin a stop string."""
        for at in range(len(self._held)):
            if any(stop.startswith(self._held[at:]) for stop in self.stops):
                return len(self._held) - at
        return 0

    def _release(self, count: int) -> tuple[str, list[TokenLogprob]]:
        text, self._held = self._held[:count], self._held[count:]
        self._num_returned += count
        certain = [each for each in self._logprobs if each.at < self._num_returned]
        self._logprobs = self._logprobs[len(certain) :]
        return text, certain


@dataclass(frozen=True)
class RequestTokenizer:
    """The model's tokenizer, with the calls that requests need."""

    tokenizer: PreTrainedTokenizerFast

    def prompt_ids(self, text: str) -> list[int]:
        """Return the tokens of a plain prompt, with the model's special tokens, BOS once."""
        ids = [int(each) for each in self.tokenizer(text, verbose=False)["input_ids"]]
        return ids[num_repeated_bos(ids, self.tokenizer.bos_token_id) :]

    def chat_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the tokens of a conversation, by the chat template or as plain lines.

        Raises:
            TemplateRefusedError: the chat template rejects these messages.
        """
        if not self.tokenizer.chat_template:
            lines = [f"{each['role']}: {each['content']}\n" for each in messages]
            return self.prompt_ids("".join([*lines, "assistant:"]))
        text = rendered_chat(self.tokenizer, messages, add_generation_prompt=True)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def token_text(self, token: int) -> str:
        """Return the text of a single token."""
        return str(self.tokenizer.decode([token]))

    def answer(self, stops: Sequence[str]) -> IncrementalDetokenizer:
        """Return an empty answer."""
        return IncrementalDetokenizer(self.tokenizer, stops)
