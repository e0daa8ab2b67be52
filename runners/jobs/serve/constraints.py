"""What an answer is held to: a JSON schema, or calls of tools; without torch and the library.

The texts are grammars of llguidance (Lark with ``%json``), which ``grammars`` compiles.
Source: github.com/guidance-ai/llguidance, docs/syntax.md and docs/json_schema.md.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from runners.jobs.serve.tool_calls import CallForm

Literal = Callable[[str], str]  # a text as a terminal of a grammar

ANY_OBJECT = '{"type": "object"}'
MOST_CALLS = 16  # of one answer whose calls are forced
# As JSON is written: a space, or a line with its indent. A weak model would write any without end.
_SPACES = {"whitespace_pattern": r"( |\r?\n[ \t]{0,32})"}


class CalledTool(NamedTuple):
    """A tool that an answer has to call: its name, and the JSON schema of its arguments.

    Without ``is_strict`` keywords of the schema that no grammar has are left out of it.
    """

    name: str
    schema: str
    is_strict: bool = False


class Constraint(NamedTuple):
    """What an answer is: JSON of a schema, calls of tools, or either where it has both.

    ``schema`` is JSON text, None: the answer is calls alone. ``most_calls`` is at least 1 where
    there are tools.
    """

    schema: str | None = None
    form: CallForm | None = None
    tools: tuple[CalledTool, ...] = ()
    most_calls: int = MOST_CALLS

    def grammar(self, literal: Literal) -> str:
        """Return the grammar; ``literal`` writes a text, also one that is a special token."""
        ways: list[str] = []
        rules: list[str] = []
        if self.schema is not None:
            ways.append("answer")
            rules.append(f"answer: {_json_rule(self.schema, is_strict=True)}")
        if self.tools and self.form is not None:
            ways.append("calls")
            rules += _call_rules(self.form, self.tools, self.most_calls, literal)
        return "\n".join([f"start: {' | '.join(ways)}", *rules, ""])

    @property
    def parts(self) -> Mapping[str, "Constraint"]:
        """Return each schema alone, by what it is of: a tool's name, or "" for the answer."""
        found = {each.name: self._replace(schema=None, tools=(each,)) for each in self.tools}
        return found | ({} if self.schema is None else {"": Constraint(self.schema)})

    @property
    def sizes(self) -> Mapping[str, int]:
        """Return the characters of each schema, by what it is of, as ``parts`` has it."""
        found = {each.name: len(each.schema) for each in self.tools}
        return found | ({} if self.schema is None else {"": len(self.schema)})


def quoted(text: str) -> str:
    """Return a text as a terminal of a grammar."""
    return json.dumps(text)


def called_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[CalledTool, ...]:
    """Return what an answer may have to call of a request's tools."""
    functions = [each["function"] for each in tools]
    return tuple(
        CalledTool(
            each["name"],
            json.dumps(each.get("parameters") or {"type": "object"}),
            bool(each.get("strict")),
        )
        for each in functions
    )


def _call_rules(
    form: CallForm, tools: Sequence[CalledTool], most: int, literal: Literal
) -> list[str]:
    """Return the rules of one to ``most`` calls as a chat template has them."""
    opening = f"{literal(form.begin)} " if form.begin else ""
    opening += quoted(form.opening) if form.opening else ""
    closing = quoted(form.closing) if form.closing else ""
    closing += f" {literal(form.end)}" if form.end else ""
    if form.joint:
        calls = f"{opening} {_several('call', form.joint, most)} {closing}"
    else:
        calls = _several("wrapped", "\n", most)
    names = " | ".join(f"call_{at}" for at in range(len(tools)))
    rules = [f"calls: {calls}", f"call: {names}"]
    if not form.joint:
        rules.append(f"wrapped: {opening} call {closing}")
    for at, each in enumerate(tools):
        head = f'{{"name": {json.dumps(each.name, ensure_ascii=False)}, "{form.arguments}": '
        schema = _json_rule(each.schema, is_strict=each.is_strict)
        rules.append(f'call_{at}: {quoted(head)} {schema} "}}"')
    return rules


def _several(rule: str, joint: str, most: int) -> str:
    """Return one to ``most`` of a rule with a text between them."""
    return rule if most == 1 else f"{rule} ({quoted(joint)} {rule}){{0,{most - 1}}}"


def _json_rule(schema: str, *, is_strict: bool) -> str:
    found = json.loads(schema)
    if isinstance(found, dict):
        found = found | {"x-guidance": {**_SPACES, "lenient": not is_strict}}
    return f"%json {json.dumps(found)}"
