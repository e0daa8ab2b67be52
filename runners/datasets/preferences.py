"""Records that a model learns from by comparison: pairs of answers, rated ones, prompts alone.

Formats: https://huggingface.co/docs/trl/dataset_formats (preference, unpaired preference, prompt
only).
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from runners.datasets.conversations import (
    NOTHING,
    DataError,
    Turn,
    string_of,
    system_turns,
    turns_of,
)

Passage = str | tuple[Turn, ...]  # a text, or messages
# Fields that other formats have beside “chosen” and “rejected”: without them the prompt is lost.
# What a reward function may compare an answer with; it gets them under these names.
REWARD_COLUMNS = ("answer", "solution", "ground_truth")
# Fields that hold an answer to learn: with them a record is no prompt alone.
ANSWERS = ("completion", "output", "response", "responses", "chosen", "rejected", "text")
OTHER_PROMPTS = ("instruction", "question", "input", "query", "history", "conversations")


class PreferenceSample(NamedTuple):
    """Two answers to a prompt, of which one is preferred.

    Without a prompt both answers begin with it, as texts or as the same first messages.
    """

    prompt: Passage | None
    chosen: Passage
    rejected: Passage


class RatedSample(NamedTuple):
    """An answer to a prompt; ``label``: whether such answers are wanted."""

    prompt: Passage
    completion: Passage
    label: bool


class PromptSample(NamedTuple):
    """A prompt that the model answers itself; ``columns``: a JSON object for reward functions."""

    prompt: Passage
    columns: str


def is_preference(document: Mapping[str, Any]) -> bool:
    """Return whether a record has both answers of a pair."""
    return all(document.get(name) not in NOTHING for name in ("chosen", "rejected"))


def is_rated(document: Mapping[str, Any]) -> bool:
    """Return whether a record has an answer that is rated by true or false."""
    has_answer = "prompt" in document and "completion" in document
    return has_answer and isinstance(document.get("label"), bool)


def is_prompt(document: Mapping[str, Any]) -> bool:
    """Return whether a record has a prompt, and no answer to learn."""
    has_prompt = document.get("prompt") not in NOTHING
    return has_prompt and not any(name in document for name in ANSWERS)


def read_preference(document: Mapping[str, Any], left_out: set[str]) -> PreferenceSample | None:
    """Return a record's pair of answers; None if one of them is empty.

    Raises:
        DataError: a field is missing or not of the kind of the others; the text names it.
    """
    for name in OTHER_PROMPTS:
        if document.get(name) not in NOTHING or name in left_out:  # a table's unread column
            raise DataError(f"“{name}” stands beside “chosen”; write the prompt as “prompt”")
    chosen = _passage(document, "chosen", left_out)
    rejected = _passage(document, "rejected", left_out)
    if type(chosen) is not type(rejected):
        raise DataError("“chosen” and “rejected” are a text and messages; make both alike")
    prompt = _prompt(document, chosen, "chosen", left_out)
    if prompt is None:  # the answers hold it
        chosen, rejected = (_after_system(document, each) for each in (chosen, rejected))
    if not (_says_something(chosen) and _says_something(rejected)):
        return None
    if prompt is None and isinstance(chosen, tuple) and chosen[0] != rejected[0]:
        raise DataError(
            "“chosen” and “rejected” begin with different messages, so they answer no common "
            "prompt; write it as “prompt”"
        )
    return PreferenceSample(prompt, chosen, rejected)


def read_rated(document: Mapping[str, Any], left_out: set[str]) -> RatedSample | None:
    """Return a record's rated answer; None if it is empty.

    Raises:
        DataError: a field is missing or not of the kind of the others; the text names it.
    """
    label = document.get("label")
    if not isinstance(label, bool):
        problem = "missing" if "label" not in document else f"{label!r:.40}"
        raise DataError(f"“label” is {problem}; it must be true or false")
    completion = _passage(document, "completion", left_out)
    prompt = _prompt(document, completion, "completion", left_out)
    if prompt is None:
        raise DataError("“prompt” is missing; write what the completion answers")
    return RatedSample(prompt, completion, label) if _says_something(completion) else None


def read_prompt(document: Mapping[str, Any], left_out: set[str]) -> PromptSample | None:
    """Return a record's prompt with what its answers are judged by; None if it is empty.

    Raises:
        DataError: the prompt is missing, or ends with an answer.
    """
    prompt = _after_system(document, _passage(document, "prompt", left_out))
    if not text_of(prompt).strip():
        return None
    if isinstance(prompt, tuple) and prompt[-1].role == "assistant":
        raise DataError("“prompt” ends with an answer; end it with the message to be answered")
    columns = {name: document[name] for name in REWARD_COLUMNS if name in document}
    return PromptSample(prompt, json.dumps(columns))


def columns_of(sample: PreferenceSample | RatedSample | PromptSample) -> dict[str, object]:
    """Return a sample as TRL's columns: texts, or messages as chat templates take them.

    Of a prompt alone the column ``record`` has what reward functions get.
    """
    if isinstance(sample, PromptSample):
        return {"prompt": written(sample.prompt), "record": sample.columns}
    fields = sample._asdict().items()
    return {name: written(value) for name, value in fields if value is not None}


def written(passage: object) -> object:
    """Return a passage's messages as chat templates take them; any other value as it is."""
    return [turn.message() for turn in passage] if isinstance(passage, tuple) else passage


def text_of(passage: Passage) -> str:
    """Return a passage as one text, for display and lengths."""
    if isinstance(passage, str):
        return passage
    return "\n".join(f"{turn.role}: {' '.join(filter(None, turn[1:3]))}" for turn in passage)


def _passage(document: Mapping[str, Any], name: str, left_out: set[str]) -> Passage:
    value = document.get(name)
    if not isinstance(value, list):
        return string_of(document, name)
    try:
        return tuple(turns_of(value, left_out, name))
    except DataError as error:
        raise DataError(f"“{name}”: {error}") from None


def _prompt(
    document: Mapping[str, Any], answer: Passage, of: str, left_out: set[str]
) -> Passage | None:
    """Return the prompt in the kind of the answer; None if the answer's messages hold it.

    A text beside messages repeats their first one, as in UltraFeedback; TRL leaves it out, too.
    """
    if document.get("prompt") in NOTHING:
        is_empty_text = of != "chosen" and "prompt" in document and isinstance(answer, str)
        return _after_system(document, "") if is_empty_text else None
    prompt = _passage(document, "prompt", left_out)
    if isinstance(prompt, str) and isinstance(answer, tuple):
        if of != "chosen":
            raise DataError(f"“prompt” is a text and “{of}” messages; make both alike")
        left_out.add("prompt")
        return None
    if isinstance(prompt, tuple) and isinstance(answer, str):
        raise DataError(f"“prompt” is messages and “{of}” a text; make both alike")
    return _after_system(document, prompt)


def _after_system(document: Mapping[str, Any], passage: Passage) -> Passage:
    """Return messages with the record's “system” before them, unless they begin with it.

    Raises:
        DataError: the record has a “system”, and the passage is a text.
    """
    system = system_turns(document)
    if system and isinstance(passage, str):
        raise DataError("“system” stands beside texts; write it into “prompt”")
    begins = [turn[:2] for turn in passage[:1]] == [turn[:2] for turn in system]
    return passage if begins or isinstance(passage, str) else (*system, *passage)


def _says_something(passage: Passage) -> bool:
    if isinstance(passage, str):
        return bool(passage.strip())
    last = passage[-1] if passage else None
    return last is not None and last.role == "assistant" and bool(f"{last.content}{last.more}")
