"""Parsers of tool calls and of reasoning that vLLM and SGLang have for a model.

``arguments/call_parsers.toml`` says by ``model_type`` and chat template which one it is.
"""

import re
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from runners.jobspec.engine_args import EngineArgsError, read_words
from runners.jobspec.engines import ENGINES, ROWS, EngineName

_PATH = Path(__file__).with_name("arguments") / "call_parsers.toml"
_OFFERS_TOOLS = re.compile(r"\btools\b")
TOOLS, REASONING = "tool-call-parser", "reasoning-parser"
_OFF = frozenset(f"--no-{flag[2:]}" for each in ROWS for flag in each.tools_flags)


class Parsers(BaseModel):
    """An engine's names of a model's parsers; None: it has none."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tools: str | None = None
    reasoning: str | None = None


class ParserRow(BaseModel):
    """The parsers of one form of tool calls, and the models that write it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    form: str
    model_types: tuple[str, ...] = ()  # any, if empty
    marks: tuple[str, ...] = ()  # texts that the chat template has, all of them
    vllm: Parsers = Field(default_factory=Parsers)
    sglang: Parsers = Field(default_factory=Parsers)

    def fits(self, model_type: str, template: str) -> bool:
        """Return whether a model writes this form."""
        is_named = not self.model_types or model_type in self.model_types
        return is_named and all(each in template for each in self.marks)

    def of(self, engine: EngineName) -> Parsers:
        """Return an engine's names of the parsers."""
        return {"vllm": self.vllm, "sglang": self.sglang}.get(engine, Parsers())


class CallParsing(NamedTuple):
    """How an engine reads a model's tool calls and reasoning: its flags, or why it cannot."""

    flags: tuple[str, ...] = ()
    refusal: str = ""  # why a call that the model may choose is not read; "": it is


@cache
def parser_rows() -> tuple[ParserRow, ...]:
    """Return the table, in its order."""
    rows = tomllib.loads(_PATH.read_text("utf-8"))["parsers"]
    return tuple(ParserRow.model_validate(each) for each in rows)


def offers_tools(template: str) -> bool:
    """Return whether a chat template writes tools into the prompt."""
    return _OFFERS_TOOLS.search(template) is not None


def call_parsing(
    engine: EngineName, engine_args: Sequence[str], model_type: str, template: str
) -> CallParsing:
    """Return the flags of a model's parsers; what ``engine_args`` state is left to them."""
    row = next((each for each in parser_rows() if each.fits(model_type, template)), None)
    found, stated = row.of(engine) if row else Parsers(), _stated(engine, engine_args)
    tools = found.tools if offers_tools(template) else None
    has_tools = TOOLS in stated or tools is not None
    is_off = any(each.split("=")[0].replace("_", "-") in _OFF for each in engine_args)
    flags = list(ENGINES[engine].tools_flags) if has_tools else []
    if tools is not None and TOOLS not in stated:
        flags += ["--tool-call-parser", tools]
    if found.reasoning is not None and REASONING not in stated:
        flags += ["--reasoning-parser", found.reasoning]
    if has_tools and not is_off:
        return CallParsing(tuple(flags))
    return CallParsing(tuple(flags), _refusal(engine, model_type, template, row))


def _stated(engine: EngineName, engine_args: Sequence[str]) -> frozenset[str]:
    """Return the options that a person gave, by their names without dashes."""
    try:
        given = list(read_words(engine, engine_args)) if engine_args else []
    except EngineArgsError:  # the launch refuses them by name
        return frozenset()
    return frozenset(slug for each in given for slug in each.option.slugs)


def _refusal(engine: EngineName, model_type: str, template: str, row: ParserRow | None) -> str:
    title = ENGINES[engine].title
    if not offers_tools(template):
        return "the model's chat template does not take tools"
    if row is None:
        return (
            f"no parser of {title} is known for the calls of this model (model_type "
            f"{model_type[:80]}); name one in engine_args (--{TOOLS}) when the endpoint starts"
        )
    return f"{title} was started without a parser of the calls of {row.form}"
