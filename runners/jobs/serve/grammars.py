"""Answers that are held to a grammar: which tokens may come next, by llguidance.

Source: github.com/guidance-ai/llguidance, which vLLM and llama.cpp use too.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache

import llguidance
import llguidance.hf
import numpy as np
import torch
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from runners.jobs.serve.constraints import Constraint, quoted

KEPT = 64  # compiled grammars: agents send the same tools again and again
KEPT_CHARACTERS = 4_000_000  # of their schemas; a compiled one takes some 22 bytes a character
MOST_CHARACTERS = 256 * 1024  # of one schema
BITS = 32  # of a word of a mask
PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")


class GrammarError(Exception):
    """A grammar could not be made of a schema; the message is the library's.

    ``part`` is the tool whose schema it is, "" for the answer's.
    """

    def __init__(self, part: str, message: str) -> None:
        super().__init__(message)
        self.part = part


class AnswerMatcher:
    """Where one answer is in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: int) -> None:
        self.matcher = matcher
        self.vocabulary = vocabulary

    def add(self, token: int) -> None:
        """Go on by a token of the answer."""
        self.matcher.consume_token(token)

    @property
    def is_complete(self) -> bool:
        """Return whether nothing can follow."""
        return self.matcher.is_stopped()

    @property
    def has_failed(self) -> bool:
        """Return whether the grammar became too complex for the library's limits."""
        return self.matcher.is_error()


class Grammars:
    """The grammars of one tokenizer; any thread may ask."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, vocabulary: int, end_ids: Sequence[int]
    ) -> None:
        """Read the tokenizer; ``vocabulary`` is the number of the model's logits.

        Raises:
            ValueError: the library cannot read this tokenizer.
        """
        self._added: dict[str, int] = dict(tokenizer.get_added_vocab())
        self._size = max(vocabulary, len(tokenizer))
        self._tokens = llguidance.hf.from_tokenizer(
            tokenizer, n_vocab=self._size, eos_token=sorted(end_ids) or None
        )
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Constraint, llguidance.LLMatcher] = OrderedDict()

    def compile(self, constraint: Constraint) -> None:
        """Make the grammar of a constraint, unless it is kept.

        Raises:
            GrammarError: a schema cannot be held to.
        """
        self._matcher(constraint)

    def matcher(self, constraint: Constraint) -> AnswerMatcher:
        """Return the begin of an answer.

        Raises:
            GrammarError: a schema cannot be held to.
        """
        return AnswerMatcher(self._matcher(constraint).deep_copy(), self._size)

    def _matcher(self, constraint: Constraint) -> llguidance.LLMatcher:
        with self._lock:
            if (known := self._compiled.get(constraint)) is not None:
                self._compiled.move_to_end(constraint)
                return known
        for part, size in constraint.sizes.items():
            if size > MOST_CHARACTERS:
                message = f"it has {size} characters as JSON, the limit is {MOST_CHARACTERS}"
                raise GrammarError(part, message)
        made = self._new_matcher(constraint)
        if made.is_error():
            raise self._error(constraint, made.get_error())
        with self._lock:
            self._compiled[constraint] = made
            while len(self._compiled) > 1 and self._keeps_too_much():
                self._compiled.popitem(last=False)
        return made

    def _keeps_too_much(self) -> bool:
        characters = sum(sum(each.sizes.values()) for each in self._compiled)
        return len(self._compiled) > KEPT or characters > KEPT_CHARACTERS

    def _new_matcher(self, constraint: Constraint) -> llguidance.LLMatcher:
        grammar = llguidance.LLMatcher.grammar_from_lark(constraint.grammar(self._literal))
        return llguidance.LLMatcher(self._tokens, grammar, log_level=0)

    def _error(self, constraint: Constraint, message: str) -> GrammarError:
        """Return the error with the part whose schema it is, and that part's own message."""
        for part, alone in constraint.parts.items():
            found = self._new_matcher(alone)
            if found.is_error():
                return GrammarError(part, _first_words(found.get_error()))
        return GrammarError("", _first_words(message))

    def _literal(self, text: str) -> str:
        """Return a text as a terminal; one that is a special token by its number."""
        token = self._added.get(text)
        if token is not None and self._tokens.is_special_token(token):
            return f"<[{token}]>"
        return quoted(text)


_executor = cache(llguidance.LLExecutor)  # threads for several answers' masks


def allowed_tokens(matchers: Sequence[AnswerMatcher], logits: torch.Tensor) -> torch.Tensor:
    """Return which tokens may come next, as a mask of logits [answers, vocabulary]."""
    words = allocate_token_bitmask(len(matchers), matchers[0].vocabulary)
    rows = [(each.matcher, at) for at, each in enumerate(matchers)]
    fill_next_token_bitmask_par(_executor(), rows, words)
    unpack = unpacked_on_host if logits.device.type == "cpu" else unpacked_on_device
    return unpack(words, logits.device)[:, : logits.shape[-1]]


def unpacked_on_host(words: NDArray[np.int32], _device: torch.device) -> torch.Tensor:
    """Return the bits of words of masks as booleans: in 0.04 ms for 152,000 tokens.

    torch's own operations take milliseconds there, since each one waits for all its threads.
    """
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    return torch.from_numpy(bits).bool()


def unpacked_on_device(words: NDArray[np.int32], device: torch.device) -> torch.Tensor:
    """Return the same from a copy of an eighth of the bytes, for a GPU."""
    bits = torch.arange(BITS, dtype=torch.int32, device=device)
    packed = torch.from_numpy(words).to(device)[:, :, None]
    return (packed >> bits).bitwise_and_(1).bool().flatten(1)


def _first_words(message: str) -> str:
    """Return the first line of the library's message, without the place in the grammar."""
    return PLACE.sub("", message.strip().split("\n", 1)[0])[:300]
