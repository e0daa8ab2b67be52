"""A model's chat template: the one call that renders it for training and for endpoints."""

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions untyped.
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # an engine's environment may be without it
    from transformers import PreTrainedTokenizerFast

Messages = Sequence[dict[str, Any]]
USER, SYSTEM = {"role": "user", "content": "a"}, {"role": "system", "content": "a"}
PROBES = ([USER], [SYSTEM, USER])  # some templates demand a system message


def num_repeated_bos(ids: Sequence[int], bos: int | None) -> int:
    """Return how many BOS tokens follow the first at a text's begin.

    A text that a template rendered begins with the BOS token that its tokenizer adds again.
    """
    count = 0
    while bos is not None and list(ids[count : count + 2]) == [bos, bos]:
        count += 1
    return count


def repeated_bos_words(count: int, what: str, bos: str | None) -> str:
    """Return the sentence about texts that began with the BOS token already."""
    return (
        f"{count:,} {what} begin with {bos} already, which the tokenizer adds: they have one"
        if count
        else ""
    )


class TemplateRefusedError(Exception):
    """The model's chat template rejects these messages; the text is the template's own."""


def template_warning(fault: str) -> str:
    """Return the line that an endpoint logs when it loads a template that cannot render."""
    return (
        f"the model's chat template renders no conversation: {fault}; /v1/chat/completions "
        "answers 400 with these words, and /v1/completions works. Mend chat_template in "
        "tokenizer_config.json or chat_template.jinja, and start the endpoint again"
    )


def rendered_chat(
    tokenizer: "PreTrainedTokenizerFast",
    messages: Messages,
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    add_generation_prompt: bool,
) -> str:
    """Return a conversation, with the tools on offer, as the tokenizer's chat template writes it.

    Raises:
        TemplateRefusedError: the template fails, or there is none by the name ``default``.
    """
    try:
        text = tokenizer.apply_chat_template(
            list(messages),
            tools=None if tools is None else list(tools),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    except Exception as error:  # noqa: BLE001 - a template is code of the model's makers
        raise TemplateRefusedError(f"{type(error).__name__}: {error}"[:1000]) from None
    return str(text)


def template_fault(render: Callable[[list[dict[str, str]]], object]) -> str:
    """Return why an engine renders no conversation at all, or an empty text."""
    faults: list[str] = []
    for messages in PROBES:
        try:
            render(messages)
        except TemplateRefusedError as refusal:
            faults.append(str(refusal))
        else:
            return ""
    return faults[0]
