"""Further arguments of an engine (``engine_args``): checked against its release's own list.

The lists lie in ``arguments``, one for each engine, as its parser states them
(``python -m runners.environments.read_engine_args`` makes them). ``arguments/refused.toml`` has
what a launch cannot have: what the plan sets, and what would open the host or the endpoint.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from runners.jobspec.engines import ENGINES, EngineName

_FOLDER = Path(__file__).with_name("arguments")
MOST_WORDS, LONGEST_WORD = 100, 2000
Word = Annotated[str, StringConstraints(min_length=1, max_length=LONGEST_WORD)]
Accepts = Literal["int", "float", "size", "json", "text", "file"]
NEAREST_SIMILARITY = 0.6
MOST_CHOICES_SHOWN = 20
SHOWN_CHARACTERS = 60
_NUMBER = re.compile(r"-?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)
_SIZE = re.compile(r"-?\d+(\.\d+)?([kmgtKMGT]i?[bB]?)?", re.ASCII)
# A path from the root, the home or the parent folder, also inside a list or an assignment.
_PATH = re.compile(r"(^|[\s,=:;\[({\"'])(\.{0,2}/|~)|://|\.\./")
_PYTHON_NAME = re.compile(r"[A-Za-z_]\w*([.:][A-Za-z_]\w*)+", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class EngineArgsError(ValueError):
    """An argument that a launch cannot have; the text names it, the reason and the way out."""


class EngineOption(BaseModel):
    """One option of an engine: its spellings, how many values it takes, and of what kind.

    ``values`` is a number of words, or ``?``, ``*`` and ``+`` as in argparse.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    names: tuple[str, ...]
    values: int | Literal["?", "*", "+"] = 0
    accepts: tuple[Accepts, ...] = ()
    choices: tuple[str, ...] = ()
    default: str | float | bool | None = None
    is_deprecated: bool = False

    @property
    def slugs(self) -> frozenset[str]:
        """Return its names without dashes and without ``no-``."""
        bare = [each.lstrip("-") for each in self.names]
        return frozenset([*bare, *(each.removeprefix("no-") for each in bare)])


class ArgumentList(BaseModel):
    """The options of one release of an engine, when and where they were read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: EngineName
    release: str
    read_on: str
    source: str
    options: tuple[EngineOption, ...] = Field(min_length=1)

    @property
    def title(self) -> str:
        """Return the engine and its release, for sentences."""
        return f"{ENGINES[self.engine].title} {self.release}"


class Given(NamedTuple):
    """One flag as it was given, its values and its option."""

    flag: str
    values: tuple[str, ...]
    option: EngineOption
    words: tuple[str, ...]
    key: str = ""  # the part of a JSON value that it sets, as in --compilation-config.mode


class _Refused(NamedTuple):
    set_by: dict[str, dict[str, str]]
    reasons: tuple[tuple[str, frozenset[str], tuple[re.Pattern[str], ...]], ...]


@cache
def arguments_of(engine: EngineName) -> ArgumentList | None:
    """Return the options of the release that an engine's environment pins, None without a list."""
    path = _FOLDER / f"{engine}.json"
    if not path.is_file():
        return None
    return ArgumentList.model_validate_json(path.read_text("utf-8"))


def engines_with_arguments() -> tuple[EngineName, ...]:
    """Return the engines that take further arguments."""
    return tuple(each for each in ENGINES if (_FOLDER / f"{each}.json").is_file())


@cache
def _refused() -> _Refused:
    text = (_FOLDER / "refused.toml").read_text("utf-8")
    data: dict[str, Any] = tomllib.loads(text)
    rows = (
        (each["reason"], frozenset(each["names"]), tuple(map(re.compile, each["patterns"])))
        for each in data["refused"]
    )
    return _Refused(data["set_by"], tuple(rows))


@cache
def _by_name(engine: EngineName) -> dict[str, EngineOption]:
    known = arguments_of(engine)
    return {name: each for each in known.options for name in each.names} if known else {}


def check_engine_args(
    engine: EngineName, words: Sequence[str], *, release: str | None = None
) -> None:
    """Refuse words that the release does not know, that the plan sets, or that are unsafe.

    ``release`` is the one that is installed, where that is known.

    Raises:
        EngineArgsError: a word is refused.
    """
    if not words:
        return
    known = _known(engine)
    if release is not None and release.partition("+")[0] != known.release:
        raise EngineArgsError(
            f"{ENGINES[engine].title} {release} is installed here, and its arguments are known of "
            f"{known.release} alone; leave engine_args out, or install that release"
        )
    for given in read_words(engine, words):
        _check(known, given)


def usable_args(engine: EngineName, words: Sequence[str]) -> tuple[str, ...]:
    """Return the words if a launch can have them, else nothing."""
    try:
        check_engine_args(engine, words)
    except EngineArgsError:
        return ()
    return tuple(words)


def _known(engine: EngineName) -> ArgumentList:
    """Return an engine's list.

    Raises:
        EngineArgsError: it has none; the text says what it has.
    """
    known = arguments_of(engine)
    if known is not None:
        return known
    others = ", ".join(engines_with_arguments())
    raise EngineArgsError(
        f"{ENGINES[engine].title} takes no engine_args: its options are the launch's and the "
        f"plan's own fields; leave them out, or choose an engine that takes them: {others}"
    )


def read_words(engine: EngineName, words: Sequence[str]) -> Iterator[Given]:
    """Yield the flags of a command line, each with its values.

    Raises:
        EngineArgsError: a word is no flag of the release, or belongs to none.
    """
    known, options, at = _known(engine), _by_name(engine), 0
    while at < len(words):
        flag, equals, value = words[at].partition("=")
        if not _is_flag(words[at]):
            raise EngineArgsError(
                f"{_shown(words[at])} belongs to no flag; write engine_args as FLAG VALUE, with "
                "quotes around a value that has blanks"
            )
        name, key = _name(engine, flag)
        option = options.get(name)
        if option is None or (key and "json" not in option.accepts):
            raise EngineArgsError(
                f"{_shown(flag)} is no argument of {known.title}{_near(engine, name)}"
            )
        if equals and not ENGINES[engine].takes_equals:
            raise EngineArgsError(
                f"{_shown(words[at])}: {ENGINES[engine].title} reads {flag} VALUE, without “=”"
            )
        start, at, values = at, at + 1, [value] if equals else []
        while at < len(words) and not _is_flag(words[at]) and not equals:
            values.append(words[at])
            at += 1
        yield Given(flag, tuple(values), option, tuple(words[start:at]), key)


def _name(engine: EngineName, flag: str) -> tuple[str, str]:
    """Return the spelling that an engine's list has of a flag, and the part that it sets."""
    row = ENGINES[engine]
    name, _, key = flag.partition(".") if row.sets_json_parts else (flag, "", "")
    if row.takes_underscores and name.startswith("--"):
        name = f"--{name[2:].replace('_', '-')}"
    return name, key


def _is_flag(word: str) -> bool:
    return word.startswith("-") and _NUMBER.fullmatch(word) is None


def _near(engine: EngineName, name: str) -> str:
    names = [each for each in _by_name(engine) if each.startswith("--")]
    nearest = get_close_matches(name[:SHOWN_CHARACTERS], names, n=1, cutoff=NEAREST_SIMILARITY)
    return f"; the nearest is {nearest[0]}" if nearest else "; leave it out"


def _check(known: ArgumentList, given: Given) -> None:
    """Refuse one flag that is the plan's, unsafe, or has values of another kind."""
    slugs, flag = given.option.slugs, _shown(given.flag)
    own = _refused().set_by.get(known.engine, {})
    if field := next((own[slug] for slug in sorted(slugs) if slug in own), None):
        raise EngineArgsError(f"{flag} is set by {field}; leave it out of engine_args")
    if reason := _reason(slugs):
        raise EngineArgsError(f"{flag} is not allowed: {reason}; leave it out")
    if given.option.accepts == ("file",):
        raise EngineArgsError(f"{flag} is not allowed: it names a file of the host; leave it out")
    _check_count(known, given)
    for value in given.values:
        _check_value(known, given, value)


def _reason(slugs: frozenset[str]) -> str | None:
    for reason, names, patterns in _refused().reasons:
        if names & slugs or any(p.fullmatch(slug) for p in patterns for slug in slugs):
            return reason
    return None


def _check_count(known: ArgumentList, given: Given) -> None:
    takes = 1 if given.key else given.option.values
    count = len(given.values)
    low = takes if isinstance(takes, int) else int(takes == "+")
    high = takes if isinstance(takes, int) else 1 if takes == "?" else MOST_WORDS
    if low <= count <= high:
        return
    words = {0: "no value", 1: "one value"}.get(low, f"{low} values")
    least = "at least " if high > low else ""
    raise EngineArgsError(
        f"{_shown(given.flag)} of {known.title} takes {least}{words}, and {count} "
        f"{'is' if count == 1 else 'are'} given"
        + (f": {_shown(' '.join(given.values))}" if count else "")
    )


def _check_value(known: ArgumentList, given: Given, value: str) -> None:
    option, flag = given.option, _shown(given.flag)
    if _CONTROL.search(value):
        raise EngineArgsError(f"{flag} has a control character; leave it out")
    if option.choices and value not in option.choices:
        more = ", …" if len(option.choices) > MOST_CHOICES_SHOWN else ""
        offered = ", ".join(option.choices[:MOST_CHOICES_SHOWN]) + more
        raise EngineArgsError(
            f"{flag} is {_shown(value)}, which {known.title} does not have; choose {offered}"
        )
    kinds = () if given.key or option.choices else option.accepts
    if kinds and not any(_is_of_kind(value, kind) for kind in kinds):
        words = " or ".join(_KINDS[kind] for kind in kinds)
        raise EngineArgsError(f"{flag} is {_shown(value)}; {known.title} takes {words} there")
    for name in [*given.key.split("."), *_keys_in(value)]:
        if reason := _reason(frozenset([name.replace("_", "-")])):
            raise EngineArgsError(f"{flag} is not allowed to set {_shown(name)}: {reason}")
    for text in _texts_in(value):
        if _PATH.search(text):
            raise EngineArgsError(
                f"{flag} is not allowed to name {_shown(text)}: a job reads no other files of the "
                "host and no addresses; leave it out"
            )
        if _PYTHON_NAME.fullmatch(text) and not option.choices:
            raise EngineArgsError(
                f"{flag} is not allowed to name {_shown(text)}, which reads like a file or a name "
                "of Python code; leave it out"
            )


_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "size": "a number such as 16k",
    "json": "a JSON object",
    "text": "a text",
    "file": "a file",
}


def _is_of_kind(value: str, kind: Accepts) -> bool:
    if kind == "int":
        return re.fullmatch(r"-?\d+", value, re.ASCII) is not None
    if kind in {"float", "size"}:
        return (_NUMBER if kind == "float" else _SIZE).fullmatch(value) is not None
    return kind != "json" or isinstance(_json(value), dict | list)


def _json(text: str) -> Any:  # noqa: ANN401 - as in JSON
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _parts_of(value: str) -> list[Any]:
    """Return a value, or every part of it if it is a JSON document."""
    parts: list[Any] = [parsed if isinstance(parsed := _json(value), dict | list) else value]
    for each in parts:  # grows while it is read
        parts += (
            each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        )
    return parts


def _keys_in(value: str) -> Iterator[str]:
    return (key for each in _parts_of(value) if isinstance(each, dict) for key in each)


def _texts_in(value: str) -> Iterator[str]:
    return (each for each in _parts_of(value) if isinstance(each, str))


def _shown(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[: SHOWN_CHARACTERS - 1]}…"
