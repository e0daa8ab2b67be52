"""Tokenisation of prompts, and incremental detokenisation of answers with stop strings."""

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions untyped.
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

from transformers import PreTrainedTokenizerFast

from runners.jobs.chat_template import num_repeated_bos, rendered_chat
from runners.jobs.serve.contract import UNFINISHED, Choice, TokenLogprob, Turn


@dataclass
class IncrementalDetokenizer:
    """Incremental text of one answer: whole characters, cut at a stop string."""

    tokenizer: PreTrainedTokenizerFast
    stops: Sequence[str] = ()
    ids: list[int] = field(default_factory=list)
    shown: Mapping[int, str] = field(default_factory=dict)  # special tokens that stay
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
        if not self.shown:
            return self._plain(self.ids[begin:end])
        parts = groupby(self.ids[begin:end], self.shown.get)
        return "".join(
            shown * len(list(ids)) if shown else self._plain(list(ids)) for shown, ids in parts
        )

    def _plain(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

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

    @cached_property
    def template(self) -> str:
        """Return the text of the chat template, of several that for tools; "" without one."""
        found = self.tokenizer.chat_template or ""
        return (
            str(found.get("tool_use", found.get("default"))) if isinstance(found, dict) else found
        )

    def chat_ids(
        self, messages: Sequence[Turn], tools: Sequence[dict[str, Any]] | None = None
    ) -> list[int]:
        """Return the tokens of a conversation, by the chat template or as plain lines.

        Raises:
            TemplateRefusedError: the chat template rejects these messages.
        """
        if not self.tokenizer.chat_template:
            lines = [f"{each['role']}: {each['content']}\n" for each in messages]
            return self.prompt_ids("".join([*lines, "assistant:"]))
        turns = [_with_objects(each) for each in messages]
        text = rendered_chat(self.tokenizer, turns, tools=tools, add_generation_prompt=True)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def token_text(self, token: int) -> str:
        """Return the text of a single token."""
        return str(self.tokenizer.decode([token]))

    def answer(
        self, stops: Sequence[str], shown_tokens: Sequence[str] = ()
    ) -> IncrementalDetokenizer:
        """Return an empty answer, whose text has these special tokens."""
        ids = self.tokenizer.get_added_vocab() if shown_tokens else {}
        shown = {int(ids[each]): each for each in shown_tokens if each in ids}
        return IncrementalDetokenizer(self.tokenizer, stops, shown=shown)


def _with_objects(turn: Turn) -> Turn:
    """Return a message whose calls have objects as arguments, as transformers' templates do."""
    if "tool_calls" not in turn:
        return turn
    calls = [
        each | {"function": each["function"] | {"arguments": json.loads(arguments or "{}")}}
        for each in turn["tool_calls"]
        for arguments in (each["function"].get("arguments"),)
    ]
    return turn | {"tool_calls": calls}
