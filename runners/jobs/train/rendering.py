"""A sample as one text with the parts of it that are learnt.

A conversation is written by the tokenizer's own chat template, so that what is learnt is what an
endpoint will ask; a tokenizer without one is given ours, and keeps it.
"""

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions without.

from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from runners.datasets.records import ChatSample, CompletionSample, Sample
from runners.jobs.runtime import BadInputError

# ChatML's frame, with the end of text after an answer: a model that knows no <|im_end|> as a
# token of its own still learns where to stop.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>' }}{% if message['role'] == 'assistant' %}"
    "{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
Span = tuple[int, int]


class Rendered(NamedTuple):
    """A text, and from which character to which it is learnt."""

    text: str
    spans: tuple[Span, ...]
    is_chat: bool = False  # the template wrote every special token itself


class Renderer:
    """Writes samples for one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Write by the tokenizer's template; without one it is given ours."""
        self._tokenizer = tokenizer
        self.num_last_only = 0  # chats of which only the last answer is learnt

    def rendered(self, sample: Sample, where: str) -> Rendered:
        """Return a sample's text; ``where`` names its file and line.

        Raises:
            BadInputError: the chat template takes no such conversation.
        """
        if isinstance(sample, ChatSample):
            return self._chat(sample, where)
        if isinstance(sample, CompletionSample):
            text = sample.prompt + sample.completion
            return Rendered(text, ((len(sample.prompt), len(text)),))
        return Rendered(sample.text, ((0, len(sample.text)),))

    def _chat(self, sample: ChatSample, where: str) -> Rendered:
        messages = [turn._asdict() for turn in sample.turns]
        try:
            text = self._written(messages)
            answers = [at for at, turn in enumerate(sample.turns) if turn.role == "assistant"]
            spans = [self._span(messages, at, text) for at in answers]
        except (TemplateError, TypeError) as error:
            raise BadInputError(
                f"{where}: the model's chat template refuses this conversation: {error}"
            ) from None
        found = tuple(span for span in spans if span is not None)
        if not found:
            raise BadInputError(
                f"{where}: the model's chat template writes no answer where it would be asked "
                "for one, so nothing can be learnt; write prompt and completion instead"
            )
        self.num_last_only += len(found) < len(spans)
        return Rendered(text, found, is_chat=True)

    def _span(self, messages: list[dict[str, Any]], at: int, whole: str) -> Span | None:
        """Return where an answer stands; None where later turns change how it is written."""
        asked = self._written(messages[:at], is_asked=True)
        told = self._written(messages[: at + 1]).rstrip()
        if not (told.startswith(asked) and whole.startswith(told)):
            return None
        return len(asked), len(told)

    def _written(self, messages: list[dict[str, Any]], *, is_asked: bool = False) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=is_asked
            )
        )


def give_template(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Give a tokenizer without a chat template ours; return whether it is ours."""
    if not tokenizer.chat_template:
        tokenizer.chat_template = DEFAULT_TEMPLATE
    return bool(tokenizer.chat_template == DEFAULT_TEMPLATE)
