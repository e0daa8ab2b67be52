"""Conversations in training data: turns, tool calls, and what of them is learnt.

Messages with ``role`` and ``content`` as OpenAI has them, turns of ShareGPT with ``from`` and
``value``, and TRL's pairs of lists. Formats: https://platform.openai.com/docs/api-reference/chat,
https://github.com/hiyouga/LLaMA-Factory/tree/main/data, and
https://huggingface.co/docs/trl/dataset_formats.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from runners.datasets.text import TextError, read_json, storable

ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {  # of “from”, as FastChat, Axolotl and LLaMA-Factory write them
    "system": "system", "human": "user", "user": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "model": "assistant",
    "function_call": "assistant", "observation": "tool", "function_response": "tool",
    "tool": "tool",
}  # fmt: skip
READ_OF_MESSAGE = frozenset(
    {"role", "content", "tool_calls", "weight", "train", "training", "loss"}
)
PASSED_ON = ("name", "tool_call_id", "reasoning_content", "thinking")  # to the chat template
MEDIA = ("image", "images", "audio", "audios", "video", "videos")
REFUSED: dict[str, str] = {  # fields that change what is learnt, and the way out
    **dict.fromkeys(
        MEDIA, "jobs train on text only; remove the field, or the records that need it"
    ),
    "functions": "write the functions as “tools”",
    "function_call": "write the call as “tool_calls”",
    **dict.fromkeys(
        ("chosen", "rejected"),
        "a preference has “chosen” and “rejected”; give both, or leave it out to learn the rest",
    ),
    "preferred_output": "write it as “chosen”, and the other one as “rejected”",
    "non_preferred_output": "write it as “rejected”, and the other one as “chosen”",
    "completions": "a record has one “completion”; write one record for each",
}
NOTHING: tuple[object, ...] = (None, "", [], {})  # values of a field that change nothing


class DataError(ValueError):
    """A file or record is invalid; the text gives the reason."""


class Turn(NamedTuple):
    """One message of a conversation.

    ``more`` is a JSON object of its other fields for the chat template; the weight of an answer
    decides whether it is learnt.
    """

    role: str
    content: str
    more: str = ""
    is_learnt: bool = True

    def message(self) -> dict[str, Any]:
        """Return the message as chat templates take it."""
        return {"role": self.role, "content": self.content, **json.loads(self.more or "{}")}


class ChatSample(NamedTuple):
    """A conversation; only the assistant's turns are trained on. ``tools`` is a JSON list."""

    turns: tuple[Turn, ...]
    tools: str = ""


def string_of(document: Mapping[str, Any], name: str, *, is_needed: bool = True) -> str:
    """Return the text of a field.

    Raises:
        DataError: it is missing although needed, or is not text.
    """
    value = document.get(name, None if is_needed else "")
    if value is None and not is_needed:
        return ""
    if not isinstance(value, str):
        problem = "missing" if name not in document else f"not text but {type(value).__name__}"
        listed = ", ".join(sorted(map(str, document))[:8]) or "none"
        raise DataError(f"“{name}” is {problem}; its fields are {listed[:200]}")
    return storable(value, name)


def system_turns(document: Mapping[str, Any]) -> list[Turn]:
    """Return the turn of a record's “system”, if it has one."""
    text = string_of(document, "system", is_needed=False)
    return [Turn("system", text)] if text.strip() else []


def with_messages(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a conversation of TRL's “prompt” and “completion”, two lists of messages, as one.

    Only the completion is learnt.

    Raises:
        DataError: one of them is a list and the other is not.
    """
    prompt, completion = document.get("prompt"), document.get("completion")
    if "messages" in document or not isinstance(completion, list):
        return document
    if not isinstance(prompt, list) or not all(isinstance(each, dict) for each in prompt):
        raise DataError("“completion” is a list of messages and “prompt” is not; make both alike")
    rest = {name: each for name, each in document.items() if name not in {"prompt", "completion"}}
    return {**rest, "messages": [*({**each, "weight": 0} for each in prompt), *completion]}


def read_conversation(
    document: Mapping[str, Any], left_out: set[str], field: str = "messages"
) -> ChatSample | None:
    """Return the conversation in a record's ``field``; None without an answer to learn.

    The names of what is not read of its messages are added to ``left_out``.

    Raises:
        DataError: it is no conversation, or holds what would change what is learnt.
    """
    messages = document.get(field)
    if not isinstance(messages, list):
        listed = ", ".join(sorted(map(str, document))[:8])[:200]
        raise DataError(
            f"“{field}” is not a list of messages with “role” and “content”; its fields are "
            f"{listed}"
        )
    turns = turns_of(messages, left_out, field)
    if not turns:
        return None
    if field == "messages" and not any(turn.role == "assistant" for turn in turns):
        raise DataError("no message has the role “assistant”, and only those have a loss; add one")
    if system := system_turns(document):
        if any(turn.role == "system" for turn in turns):
            raise DataError("“system” stands beside a message of that role; keep one of them")
        turns = [*system, *turns]
    if not any(turn.role == "assistant" and turn.is_learnt for turn in turns):
        return None
    return ChatSample(tuple(turns), _tools(document))


def turns_of(messages: Sequence[object], left_out: set[str], field: str) -> list[Turn]:
    """Return the turns of a record's ``field``; the names of what is not read go to ``left_out``.

    Raises:
        DataError: a message is none, or holds what would change what is learnt.
    """
    unread: set[str] = set()
    turns = [_turn(number, each, unread) for number, each in enumerate(messages, 1)]
    left_out.update(f"{field}.{name}" for name in unread)
    return turns


def _as_message(number: int, turn: dict[str, Any]) -> dict[str, Any]:
    """Return a turn of ShareGPT, with “from” and “value”, as a message; others as they are."""
    if "from" not in turn or "role" in turn:
        return turn
    said_by, value = turn["from"], turn.get("value")
    if not isinstance(said_by, str) or said_by not in SHAREGPT_ROLES:
        known = ", ".join(SHAREGPT_ROLES)
        raise DataError(f"message {number} is from {str(said_by)[:40]!r}; known are {known}")
    if "content" in turn or ("value" not in turn):
        raise DataError(f"message {number} needs one text, named “value” beside “from”")
    message = {name: each for name, each in turn.items() if name not in {"from", "value"}}
    message |= {"role": SHAREGPT_ROLES[said_by], "content": value}
    if said_by != "function_call":
        return message
    try:
        calls = read_json(value) if isinstance(value, str) else value
    except TextError as error:
        raise DataError(f"message {number}: the function_call in “value”: {error}") from None
    calls = calls if isinstance(calls, list) else [calls]
    return message | {"content": "", "tool_calls": [{"function": each} for each in calls]}


def _tools(document: Mapping[str, Any]) -> str:
    """Return the JSON list of a record's tools; some files hold it as a text."""
    tools = document.get("tools")
    if tools in NOTHING:
        return ""
    if isinstance(tools, str):
        tools = read_json(tools)
    if not isinstance(tools, list) or not all(map(_tool_name, tools)):
        raise DataError('“tools” is not a list of {"type": "function", "function": {"name": …}}')
    return storable(json.dumps(tools, ensure_ascii=False), "tools")


def _tool_name(tool: object) -> str:
    """Return the name of a tool or call, or nothing for what is none."""
    inner = tool.get("function", tool) if isinstance(tool, dict) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    return name if isinstance(name, str) else ""


def _turn(number: int, message: object, left_out: set[str]) -> Turn:
    if not isinstance(message, dict):
        raise DataError(f"message {number} is not an object with “role” and “content”")
    message = _as_message(number, message)
    role = message.get("role")
    if role not in ROLES:
        raise DataError(
            f"message {number} has the role {str(role)[:40]!r}; known are {', '.join(ROLES)}"
        )
    for name, value in message.items():
        if name not in READ_OF_MESSAGE and name not in PASSED_ON and value not in NOTHING:
            if name in REFUSED:
                raise DataError(f"message {number}: “{name}”: {REFUSED[name]}")
            left_out.add(name)
    more = {name: message[name] for name in PASSED_ON if message.get(name) not in NOTHING}
    for name, value in more.items():
        if not isinstance(value, str):
            raise DataError(f"message {number}: “{name}” is not text but {type(value).__name__}")
    if calls := _tool_calls(number, str(role), message):
        more["tool_calls"] = calls
    content = _content(number, message, left_out, is_needed=not calls)
    is_learnt = _is_learnt(number, message)
    if role == "assistant" and not content.strip() and not calls:
        is_learnt = False  # nobody wants to teach silence
    text = storable(json.dumps(more, ensure_ascii=False), f"message {number}") if more else ""
    return Turn(str(role), content, text, is_learnt or role != "assistant")


def _content(number: int, message: dict[str, Any], left_out: set[str], *, is_needed: bool) -> str:
    """Return a message's text; the texts of a list of parts are joined."""
    content = message.get("content")
    if not isinstance(content, list):
        return string_of(message, "content", is_needed=is_needed)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise DataError(
                f"message {number} has a part of the type {str(kind)[:40]!r}; {REFUSED['image']}"
            )
        left_out.update(f"content.{name}" for name in part if name not in {"type", "text"})
        texts.append(storable(part["text"], "content"))
    return "".join(texts)


def _tool_calls(number: int, role: str, message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a message's tool calls, their arguments as the objects that templates take."""
    calls = message.get("tool_calls")
    if calls in NOTHING:
        return []
    if role != "assistant" or not isinstance(calls, list) or not all(map(_tool_name, calls)):
        raise DataError(
            f"message {number}: “tool_calls” is not a list in an assistant message of "
            '{"type": "function", "function": {"name": …, "arguments": …}}'
        )
    return [_tool_call(number, call) for call in calls]


def _tool_call(number: int, call: dict[str, Any]) -> dict[str, Any]:
    inner = dict(call.get("function", call))
    arguments = inner.get("arguments")
    if isinstance(arguments, str):
        arguments = read_json(arguments) if arguments.strip() else {}
    if not isinstance(arguments, dict | None):
        raise DataError(f"message {number}: “arguments” of a tool call is not a JSON object")
    return {"type": "function", **call, "function": {**inner, "arguments": arguments or {}}}


def _is_learnt(number: int, message: dict[str, Any]) -> bool:
    """Return whether a message's weight, or the mark of other trainers, says that it is learnt."""
    is_learnt = True
    for name in ("weight", "train", "training", "loss"):
        value = message.get(name)
        if value not in (None, 0, 1):
            raise DataError(
                f"message {number}: “{name}” is {json.dumps(value)[:40]}; it can be 0 or 1"
            )
        is_learnt = is_learnt and value != 0
    return is_learnt
