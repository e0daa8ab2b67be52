"""Between text and tokens: prompts in, answers out as they come, cut at stop strings."""

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions without.

from collections.abc import Sequence
from dataclasses import dataclass, field

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from runners.jobs.serve.contract import UNFINISHED, Choice, TemplateRefusedError, Told


@dataclass
class Answer:
    """The text of one answer as its tokens come in: whole characters, cut at a stop string."""

    tokenizer: PreTrainedTokenizerFast
    stops: Sequence[str] = ()
    ids: list[int] = field(default_factory=list)
    is_stopped: bool = False
    _said: int = 0  # characters given out
    _held: str = ""  # characters that may be the beginning of a stop string
    _told: list[Told] = field(default_factory=list)
    _before: int = 0  # tokens from here on are decoded together: their text depends on each other
    _read: int = 0

    def take(self, choice: Choice) -> tuple[str, list[Told]]:
        """Take a token; return the text and the tokens that are certain now."""
        self.ids.append(choice.token)
        self._told.append(Told(choice, self._said + len(self._held)))
        self._held += self._new_text()
        cuts = [at for each in self.stops if (at := self._held.find(each)) >= 0]
        if cuts:
            self.is_stopped = True
            self._held = self._held[: min(cuts)]
            return self._release(len(self._held))
        return self._release(len(self._held) - self._unsure())

    def finish(self) -> tuple[str, list[Told]]:
        """Return what is left when the answer ends without a stop string."""
        if self.is_stopped:
            return "", []
        self._held += self._decoded(self._before)[len(self._decoded(self._before, self._read)) :]
        text, certain = self._held, self._told
        self._held, self._told = "", []
        return text, certain

    def _new_text(self) -> str:
        known, whole = self._decoded(self._before, self._read), self._decoded(self._before)
        if len(whole) <= len(known) or whole.endswith(UNFINISHED):
            return ""
        self._before, self._read = self._read, len(self.ids)
        return whole[len(known) :]

    def _decoded(self, begin: int, end: int | None = None) -> str:
        return str(self.tokenizer.decode(self.ids[begin:end], skip_special_tokens=True))

    def _unsure(self) -> int:
        """Return how many of the last characters may begin a stop string."""
        lengths = [
            count
            for stop in self.stops
            for count in range(1, len(stop))
            if self._held.endswith(stop[:count])
        ]
        return max(lengths, default=0)

    def _release(self, count: int) -> tuple[str, list[Told]]:
        text, self._held = self._held[:count], self._held[count:]
        self._said += count
        certain = [each for each in self._told if each.at < self._said]
        self._told = self._told[len(certain) :]
        return text, certain


@dataclass(frozen=True)
class Reader:
    """The model's tokenizer as requests need it."""

    tokenizer: PreTrainedTokenizerFast

    def prompt_ids(self, text: str) -> list[int]:
        """Return the tokens of a plain prompt, with what the model expects at its beginning."""
        return [int(each) for each in self.tokenizer(text, verbose=False)["input_ids"]]

    def chat_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the tokens of a conversation, by the model's template or as plain lines.

        Raises:
            TemplateRefusedError: the template takes no such messages.
        """
        if not self.tokenizer.chat_template:
            lines = [f"{each['role']}: {each['content']}\n" for each in messages]
            return self.prompt_ids("".join([*lines, "assistant:"]))
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise TemplateRefusedError(str(error)) from None
        return list(self.tokenizer.encode(str(text), add_special_tokens=False))

    def token_text(self, token: int) -> str:
        """Return the text of one token alone."""
        return str(self.tokenizer.decode([token]))

    def answer(self, stops: Sequence[str]) -> Answer:
        """Return an empty answer."""
        return Answer(self.tokenizer, stops)
