"""Tool calls in the text that a model writes: the forms of chat templates, read as they stream.

For Slipway's own engine and llama.cpp. llama.cpp's environment has no transformers, and
transformers' own parser raises on a damaged call, whose text an endpoint gives as content.
Forms: the chat templates of NousResearch/Hermes-3-Llama-3.1-8B and Qwen/Qwen2.5-7B-Instruct
(``hermes``), meta-llama/Llama-3.1-8B-Instruct (``llama``), mistralai/Mistral-7B-Instruct-v0.3
(``mistral``).
"""

import json
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

from runners.jobspec.call_parsers import offers_tools

_JSON = json.JSONDecoder(strict=False)  # models write line feeds into strings
_BETWEEN = " \t\r\n,;"  # several objects of one call text


class CallForm(NamedTuple):
    """How a chat template has a model write its calls.

    ``begin`` starts a call within a text; without one a call is the whole answer, a JSON object.
    ``end`` ends it, else the answer's end does. ``marks`` are texts of templates with this form,
    ``other_marks`` of those that write another one between the same words. ``special`` are tokens
    that a tokenizer would leave out of the text. ``id_length`` is that of a call's id without
    its prefix; Mistral's template takes ids of nine characters alone. A call that is forced has
    its name, then its ``arguments``; ``opening`` and ``closing`` stand around it within begin and
    end, and ``joint`` between several; without one each has a begin and an end of its own.
    """

    name: str
    begin: str
    end: str
    marks: tuple[str, ...]
    other_marks: tuple[str, ...] = ()
    special: tuple[str, ...] = ()
    id_prefix: str = "call_"
    id_length: int = 24
    arguments: str = "arguments"
    opening: str = ""
    closing: str = ""
    joint: str = ""

    def fits(self, template: str) -> bool:
        """Return whether a chat template has this form."""
        has_marks = all(each in template for each in self.marks)
        return has_marks and not any(each in template for each in self.other_marks)

    def new_id(self) -> str:
        """Return the id of a call."""
        return f"{self.id_prefix}{uuid.uuid4().hex[: self.id_length]}"


FORMS = (
    CallForm(
        "hermes", "<tool_call>", "</tool_call>", ("<tool_call>", "arguments"),
        ("<function=", "<arg_key>"), opening="\n", closing="\n",
    ),
    CallForm(
        "mistral", "[TOOL_CALLS]", "", ("[TOOL_CALLS]",), ("[ARGS]",), ("[TOOL_CALLS]",),
        id_prefix="", id_length=9, opening="[", closing="]", joint=", ",
    ),
    CallForm("llama", "", "", ("ipython", '"parameters"'), arguments="parameters", joint="; "),
)  # fmt: skip


def call_form(template: str) -> CallForm | None:
    """Return how a chat template has the model write calls; None if it is not known here."""
    if not offers_tools(template):
        return None
    return next((each for each in FORMS if each.fits(template)), None)


def tools_refusal(template: str) -> str:
    """Return why a model with this chat template is offered no tools; "": it is."""
    if not offers_tools(template):
        return "the model's chat template does not take tools"
    if call_form(template) is None:
        forms = ", ".join(each.name for each in FORMS)
        return f"the model writes its calls in a form that is not read here (of {forms})"
    return ""


class ToolCall(NamedTuple):
    """One call: its place among those of the answer, and its arguments as a JSON object."""

    at: int
    id: str
    name: str
    arguments: str


class ReadText(NamedTuple):
    """What of an answer is content, and the calls that are complete."""

    content: str = ""
    calls: tuple[ToolCall, ...] = ()


class CallReader:
    """Reads the calls of one answer; text that is no call, or a damaged one, is content.

    The text of a call is held back until it is complete, since only then it is known to be one.
    """

    def __init__(self, form: CallForm, names: frozenset[str], *, is_parallel: bool) -> None:
        self.num_calls = 0
        self._form = form
        self._names = names
        self._is_parallel = is_parallel
        self._held = ""  # space that may precede a call, or a call
        self._is_calling = False
        self._is_plain = False  # an answer that is no call as a whole

    def add(self, text: str) -> ReadText:
        """Take a text; return what is certain now."""
        self._held += text
        content, calls = "", list[ToolCall]()
        while True:
            if not self._is_calling:
                content += self._before_call()
            if not self._is_calling or not (end := self._end_of_call()):
                return ReadText(content, tuple(calls))
            written, self._held = self._held[:end], self._held[end:]
            self._is_calling = False
            found = self._calls_of(written)
            content += "" if found else written
            calls += self._numbered(found)

    def finish(self) -> ReadText:
        """Return the rest of an answer that ends now."""
        held, self._held = self._held, ""
        found = self._calls_of(held) if self._is_calling else []
        if found or (self.num_calls and not held.strip()):
            return ReadText("", tuple(self._numbered(found)))
        return ReadText(held)

    def _before_call(self) -> str:
        """Return the text before the next call; the space before it stays with the call."""
        form, held = self._form, self._held
        if self._is_plain:
            at = len(held)
        elif not form.begin:
            self._is_calling = held.lstrip().startswith("{")
            self._is_plain = bool(held.strip()) and not self._is_calling
            at = len(held) if self._is_plain else 0
        else:
            at = held.find(form.begin)
            self._is_calling = at >= 0
            at = len(held[:at].rstrip()) if self._is_calling else self._num_certain()
        self._held = held[at:]
        return held[:at]

    def _num_certain(self) -> int:
        """Return how many characters neither begin a call nor may be the space before one."""
        held, begin = self._held, self._form.begin
        partial = next(
            (size for size in range(len(begin) - 1, 0, -1) if held.endswith(begin[:size])), 0
        )
        return len(held[: len(held) - partial].rstrip())

    def _end_of_call(self) -> int:
        """Return where a call ends, 0 while it goes on."""
        end = self._form.end
        at = self._held.find(end) if end else -1
        return at + len(end) if at >= 0 else 0

    def _calls_of(self, written: str) -> list[tuple[str, str]]:
        """Return the names and arguments of a call's text, nothing if it is damaged."""
        form = self._form
        body = written.strip().removeprefix(form.begin)
        body = body.removesuffix(form.end) if form.end else body
        try:
            found = [_call(each) for each in _objects(body)]
        except (ValueError, RecursionError):
            return []
        is_certain = bool(form.begin)  # else it may be an answer in JSON
        return found if is_certain or all(name in self._names for name, _ in found) else []

    def _numbered(self, found: list[tuple[str, str]]) -> list[ToolCall]:
        if not self._is_parallel:
            found = found[: max(0, 1 - self.num_calls)]
        calls = [
            ToolCall(at, self._form.new_id(), name, arguments)
            for at, (name, arguments) in enumerate(found, self.num_calls)
        ]
        self.num_calls += len(calls)
        return calls


def _objects(text: str) -> Iterator[Any]:
    """Yield the JSON values of a text, those of a list one by one.

    Raises:
        ValueError: it is no JSON.
    """
    rest = text.strip(_BETWEEN)
    if not rest:
        raise ValueError("nothing is called")
    while rest:
        value, end = _JSON.raw_decode(rest)
        yield from value if isinstance(value, list) else [value]
        rest = rest[end:].strip(_BETWEEN)


def _call(value: object) -> tuple[str, str]:
    """Return the name and the arguments of a call, as a JSON object.

    Raises:
        ValueError: it is no call.
    """
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        raise ValueError("a call has a name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the object as a text
        arguments = json.loads(arguments, strict=False)
    if not isinstance(arguments, dict):
        raise ValueError("a call's arguments are an object")  # noqa: TRY004 - of the text
    return name, json.dumps(arguments, ensure_ascii=False)
