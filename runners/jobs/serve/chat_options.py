"""What a chat request asks of its answer: calls of tools, forced ones, and JSON of a schema."""

from collections.abc import Sequence
from typing import Any

from runners.jobs.serve.answers import ToolOffer
from runners.jobs.serve.constraints import Constraint, called_tools
from runners.jobs.serve.contract import ServingModel
from runners.jobs.serve.openai_requests import (
    AnswerFormat,
    ChatRequest,
    RequestBody,
    RequestError,
    unsupported,
)
from runners.jobs.serve.tool_calls import call_form, tools_refusal
from runners.jobspec.engines import ENGINES, ROWS, EngineName, titles

UNFORCED = (None, "none", "auto")
FORMATTED = "response_format"


def tool_offer(ready: ServingModel, request: ChatRequest, engine: EngineName) -> ToolOffer | None:
    """Return how the answer's calls are read, if the request offers tools.

    Raises:
        RequestError: the model is offered no tools, or a call cannot be forced.
    """
    if request.tool_choice not in UNFORCED:
        if FORMATTED not in ENGINES[engine].request_options:
            raise unsupported("tool_choice", _unforced(engine))
        _check_choice(request)
    if not request.offered:
        return None
    form = call_form(ready.template)
    if form is None:
        raise unsupported("tools", f"tools are not taken here: {tools_refusal(ready.template)}")
    names = frozenset(each["function"]["name"] for each in request.offered)
    return ToolOffer(form, names, request.parallel_tool_calls is not False)


async def constraint_of(
    ready: ServingModel, request: ChatRequest, calls: ToolOffer | None
) -> Constraint | None:
    """Return what the answer to a conversation is held to, if it is to anything.

    With ``response_format`` and tools that the model may call it is JSON, or calls.

    Raises:
        RequestError: it cannot be held to that; the error names the field.
    """
    schema, choice = request.answer_schema, request.tool_choice
    is_forced = choice not in UNFORCED
    if schema is None and not is_forced:
        return None
    found = Constraint(schema)
    if calls is not None:
        named = _named(choice)
        tools = [each for each in request.offered if named in (None, each["function"]["name"])]
        found = Constraint(None if is_forced else schema, calls.form, called_tools(tools))
        if named is not None or not calls.is_parallel:
            found = found._replace(most_calls=1)
    return await checked(ready, request, found, "tool_choice" if is_forced else FORMATTED)


async def completion_constraint(
    ready: ServingModel, request: RequestBody, wanted: AnswerFormat
) -> Constraint | None:
    """Return what the completion of a prompt is held to, if it is to anything.

    Raises:
        RequestError: it cannot be held to that; the error names the field.
    """
    if wanted.answer_schema is None:
        return None
    return await checked(ready, request, Constraint(wanted.answer_schema), FORMATTED)


async def checked(
    ready: ServingModel, request: RequestBody, constraint: Constraint, field: str
) -> Constraint:
    """Return a constraint that answers can be held to.

    Raises:
        RequestError: they cannot; the error names the field that asks for it.
    """
    if ready.constraint_refusal:
        raise unsupported(
            field, f"{field} is not supported by this model: {ready.constraint_refusal}"
        )
    if request.ignore_eos:
        message = f"ignore_eos is given with {field}, whose answer ends by itself; leave one out"
        raise RequestError(400, message, param="ignore_eos")
    await ready.check_constraint(constraint)
    return constraint


def _unforced(engine: EngineName) -> str:
    others = (each for each in ROWS if FORMATTED in each.request_options)
    return (
        f"tool_choice is auto or none here: {ENGINES[engine].title} does not constrain what the "
        f"model writes, so that no call is forced; serve the model with {titles(others, 'or')}"
    )


def _check_choice(request: ChatRequest) -> None:
    """Check that a forced call is one of the request's tools.

    Raises:
        RequestError: it is another one, or the choice has no known form.
    """
    names = [each["function"]["name"] for each in request.tools or ()]
    named = _named(request.tool_choice)
    if request.tool_choice != "required" and named is None:
        message = (
            "tool_choice is auto, none, required, or a function: "
            f'{{"type": "function", "function": {{"name": …}}}} (given: '
            f"{str(request.tool_choice)[:80]!r})"
        )
        raise RequestError(400, message, param="tool_choice")
    if not names:
        message = "tool_choice forces a call, but there are no tools; give tools, or leave it out"
        raise RequestError(400, message, param="tool_choice")
    if named is not None and named not in names:
        message = f"tool_choice names {named[:64]!r}, which is none of the tools {_few(names)}"
        raise RequestError(400, message, param="tool_choice")


def _few(names: Sequence[str]) -> str:
    return ", ".join(names)[:300]


def _named(choice: str | dict[str, Any] | None) -> str | None:
    """Return the name of the function that a choice forces, None if it names none."""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None
