"""Samples as text with the character spans that have a loss.

Conversations are rendered with the tokenizer's chat template, as an endpoint will send them; a
tokenizer without one gets a default template, which is saved with it.
"""

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions untyped.

from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from runners.datasets.records import ChatSample, CompletionSample, Sample
from runners.jobs.runtime import BadInputError

# ChatML, with the end of text after an answer, so that a model without an <|im_end|> token still
# learns where to stop.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>' }}{% if message['role'] == 'assistant' %}"
    "{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
Span = tuple[int, int]


class Rendered(NamedTuple):
    """A text, and the character spans that have a loss."""

    text: str
    spans: tuple[Span, ...]
    is_chat: bool = False  # the template wrote all special tokens


class Renderer:
    """Renders samples for one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Use the tokenizer's template; set the default one if it has none."""
        self._tokenizer = tokenizer
        self.num_last_only = 0  # chats in which only the last answer has a loss

    def rendered(self, sample: Sample, where: str) -> Rendered:
        """Return a sample's text; ``where`` names its file and line.

        Raises:
            BadInputError: the chat template rejects the conversation.
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
            text = self._render(messages)
            answers = [at for at, turn in enumerate(sample.turns) if turn.role == "assistant"]
            spans = [self._span(messages, at, text) for at in answers]
        except (TemplateError, TypeError) as error:
            raise BadInputError(
                f"{where}: the model's chat template refuses this conversation: {error}"
            ) from None
        known_spans = tuple(span for span in spans if span is not None)
        if not known_spans:
            raise BadInputError(
                f"{where}: the model's chat template writes no answer where it would be asked "
                "for one, so nothing can be learnt; write prompt and completion instead"
            )
        self.num_last_only += len(known_spans) < len(spans)
        return Rendered(text, known_spans, is_chat=True)

    def _span(self, messages: list[dict[str, Any]], at: int, whole: str) -> Span | None:
        """Return an answer's span; None if later turns change how it is rendered."""
        prompt = self._render(messages[:at], is_asked=True)
        with_answer = self._render(messages[: at + 1]).rstrip()
        if not (with_answer.startswith(prompt) and whole.startswith(with_answer)):
            return None
        return len(prompt), len(with_answer)

    def _render(self, messages: list[dict[str, Any]], *, is_asked: bool = False) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=is_asked
            )
        )


def give_template(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Set the default template if a tokenizer has none; return whether it has the default."""
    if not tokenizer.chat_template:
        tokenizer.chat_template = DEFAULT_TEMPLATE
    return bool(tokenizer.chat_template == DEFAULT_TEMPLATE)
