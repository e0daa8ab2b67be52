"""Shell text as commands of words, and words as options of a tool; nothing is run or expanded.

Quotes, backslashes, comments, line ends, separators, redirections and here documents are read as a
POSIX shell reads them. A command substitution becomes a marker, which the reader of a tool's
command refuses; a variable stays a variable.
"""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from planner.catalog.reading import data_toml
from planner.imports.draft import (
    REFUSED,
    BadSettingError,
    Draft,
    Option,
    Options,
    is_secret,
    refuse_many_settings,
    shown,
)
from planner.specs.base import BadRequestError

# Private markers: the text itself has no control characters (see ``paste.read_paste``).
LITERAL_DOLLAR, REDIRECTION, SUBSTITUTION, ARITHMETIC = "\0", "\1", "\2", "\3"
SEPARATORS = frozenset("\n;&|(){}")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=", re.ASCII)
NUMBER = re.compile(r"-\d+(\.\d+)?", re.ASCII)
# Words that older and newer releases take after a switch.
STATES = frozenset({"true", "false", "on", "off", "auto", "yes", "no", "enabled", "disabled"})
MOST_NESTED_SHELLS = 3


@dataclass
class Command:
    """One simple command: its words with markers, the variables before it, and its output file."""

    words: list[str]
    variables: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class Script:
    """The commands of a shell text in order, and the files that its here documents write.

    Of a container file, ``devices`` are the settings that state a number of devices, with it, and
    ``beside`` the container's other settings, each a name and a value.
    """

    commands: list[Command] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    devices: list[tuple[str, str]] = field(default_factory=list)
    beside: list[tuple[str, str]] = field(default_factory=list)


def plain(word: str) -> str:
    """Return a word as a person wrote it, without markers."""
    for marker, text in ((LITERAL_DOLLAR, "$"), (SUBSTITUTION, "$(…)"), (ARITHMETIC, "$((…))")):
        word = word.replace(marker, text)
    return word.replace(REDIRECTION, "")


def is_variable(word: str) -> bool:
    """Return whether a word has a variable or arithmetic that a shell would expand."""
    return "$" in word or ARITHMETIC in word


def source_of(*words: str) -> str:
    """Return words as the text of an item, without the values of secrets."""
    parts = []
    hidden = False
    for word in words:
        name, joined, _ = plain(word).partition("=")
        if hidden:
            parts.append("***")
        elif joined and is_secret(name):
            parts.append(f"{name}=***")
        else:
            parts.append(plain(word))
        hidden = word.startswith("-") and not joined and is_secret(name)
    return shown(" ".join(parts))


class _Scanner:
    """Splits a shell text into simple commands in one pass over its characters."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.script = Script()
        self.current: list[str] = []
        self.here: list[tuple[str, bool]] = []  # delimiters of here documents that follow
        self.here_target = ""

    def scan(self) -> Script:
        text = self.text
        while self.at < len(text):
            char = text[self.at]
            if char == "\\":
                self._backslash()
            elif char == "'":
                self._single_quotes()
            elif char == '"':
                self._double_quotes()
            elif char in "$`":
                self._dollar()
            elif char == "#" and (not self.current or self.current[-1].isspace()):
                self._comment()
            elif char in "<>":
                self._redirection()
            elif char in SEPARATORS and not (char in "{}" and not self._stands_alone()):
                self.at += 1
                self._end(is_line=char == "\n")
            else:
                self.current.append(char)
                self.at += 1
        self._end(is_line=True)
        return self.script

    def _stands_alone(self) -> bool:
        before = not self.current or self.current[-1].isspace()
        return before and self.text[self.at + 1 : self.at + 2].strip() == ""

    def _backslash(self, *, quoted: bool = False) -> None:
        following = self.text[self.at + 1 : self.at + 2]
        self.at += 2
        if following == "\n":
            self.current.append(" ")
        elif following == "$":
            self.current.append(LITERAL_DOLLAR)
        elif following.isalnum() and not quoted:  # a folder of a path on Windows
            self.current.append(f"/{following}")
        elif following:
            self.current.append(f"\\{following}")

    def _single_quotes(self) -> None:
        end = self.text.find("'", self.at + 1)
        if end < 0:
            raise _unclosed("'", self.text[self.at :])
        quoted = self.text[self.at : end + 1].replace("$", LITERAL_DOLLAR)
        self.current.append(quoted)
        self.at = end + 1

    def _double_quotes(self) -> None:
        start = self.at
        self.current.append('"')
        self.at += 1
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == '"':
                self.current.append(char)
                self.at += 1
                return
            if char == "\\":
                self._backslash(quoted=True)
            elif char in "$`":
                self._dollar()
            else:
                self.current.append(char)
                self.at += 1
        raise _unclosed('"', self.text[start:])

    def _dollar(self) -> None:
        """Read a variable as it is, and a substitution as a marker."""
        text, start = self.text, self.at
        if text.startswith("$((", start):
            self._skip(start + 1, ARITHMETIC)
        elif text.startswith("$(", start):
            self._skip(start + 1, SUBSTITUTION)
        elif text[start] == "`":
            if text[start + 1 : start + 2] == "\n":  # PowerShell's line continuation
                self.current.append(" ")
                self.at += 2
                return
            end = text.find("`", start + 1)
            self.at = len(text) if end < 0 else end + 1
            self.current.append(SUBSTITUTION)
        else:
            self.current.append("$")
            self.at += 1

    def _skip(self, opening: int, marker: str) -> None:
        """Skip to the parenthesis that closes the one at a position."""
        depth, at = 0, opening
        while at < len(self.text):
            depth += {"(": 1, ")": -1}.get(self.text[at], 0)
            at += 1
            if depth == 0:
                break
        self.current.append(marker)
        self.at = at

    def _comment(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def _redirection(self) -> None:
        """Replace a redirection by a marker before its target; note here documents."""
        here = re.compile(r"<<(-?)\s*(['\"]?)([\w.-]+)\2", re.ASCII).match(self.text, self.at)
        if here and not self.text.startswith("<<<", self.at):
            self.here.append((here[3], bool(here[1])))
            self.at = here.end()
            return
        if re.search(r"(^|\s)\d$", "".join(self.current[-2:]), re.ASCII):
            self.current.pop()  # the descriptor, as in 2>
        end = self.at
        while end < len(self.text) and self.text[end] in "<>&":
            end += 1
        self.current.append(f" {REDIRECTION}")
        while self.text[end : end + 1] in {" ", "\t"}:
            end += 1
        self.at = end

    def _end(self, *, is_line: bool) -> None:
        words = _words("".join(self.current))
        self.current = []
        target = next((word[1:] for word in words if word.startswith(REDIRECTION)), "")
        words = [word for word in words if not word.startswith(REDIRECTION)]
        variables: list[tuple[str, str]] = []
        if words and words[0] in {"export", "set", "env"}:
            words = words[1:] if ASSIGNMENT.match("".join(words[1:2])) else words
        while words and ASSIGNMENT.match(words[0]):
            name, _, value = words.pop(0).partition("=")
            variables.append((name.rstrip("+"), value))
        if words or variables:
            self.script.commands.append(Command(words, variables))
        self.here_target = target or self.here_target
        if is_line:
            while self.here:
                self._document(*self.here.pop(0))
            self.here_target = ""

    def _document(self, delimiter: str, indented: bool) -> None:  # noqa: FBT001 - of one call
        """Read a here document up to its delimiter."""
        lines: list[str] = []
        while self.at < len(self.text):
            end = self.text.find("\n", self.at)
            end = len(self.text) if end < 0 else end
            line = self.text[self.at : end]
            self.at = end + 1
            if (line.lstrip("\t") if indented else line) == delimiter:
                break
            lines.append(line)
        if self.here_target:
            self.script.files[plain(self.here_target)] = "\n".join(lines) + "\n"


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise BadRequestError(
            f"{shown(text)!r} cannot be split into words: {str(error).lower()}; correct the line "
            "and paste the text again",
            "text",
        ) from error


def _unclosed(quote: str, rest: str) -> BadRequestError:
    return BadRequestError(
        f"the quote {quote} before {shown(rest[1:40])!r} is not closed: close it, and paste the "
        "text again",
        "text",
    )


def read_script(text: str) -> Script:
    """Return the commands of a shell text, also those inside ``bash -c``.

    Raises:
        BadRequestError: a quote is not closed.
    """
    return _with_inner(_Scanner(text).scan(), 0)


def _with_inner(script: Script, depth: int) -> Script:
    """Return a script with the commands of inner shells in place of the shells."""
    commands: list[Command] = []
    for command in script.commands:
        inner = inner_text(command.words)
        if inner is None or depth >= MOST_NESTED_SHELLS:
            commands.append(command)
            continue
        nested = _with_inner(_Scanner(inner.replace(LITERAL_DOLLAR, "$")).scan(), depth + 1)
        if command.variables:
            commands.append(Command([], command.variables))
        commands += nested.commands
        script.files |= nested.files
    script.commands = commands
    return script


def inner_text(words: list[str]) -> str | None:
    """Return the text that ``bash -c`` runs, or None for other commands."""
    for at, word in enumerate(words[:-2]):
        shell = word.rsplit("/", 1)[-1] in {"bash", "sh", "zsh"}
        if shell and re.fullmatch(r"-\w*c", words[at + 1], re.ASCII):
            return words[at + 2]
    return None


# ---------------------------------------------------------------------------
# The options of a tool.
# ---------------------------------------------------------------------------


@dataclass(frozen=True)
class OptionTable:
    """The settings that a tool knows, without leading dashes and with underscores.

    ``values`` take one value, ``lists`` several and ``switches`` none; ``reasons`` are those for
    settings that a plan does not use. ``abbreviates``: a beginning that only one option has stands
    for it, as with Python's argparse.
    """

    title: str
    values: frozenset[str]
    switches: frozenset[str]
    lists: frozenset[str]
    aliases: Mapping[str, str]
    reasons: Mapping[str, str]
    abbreviates: bool

    @property
    def names(self) -> frozenset[str]:
        """Return all names, without aliases."""
        return self.values | self.switches | self.lists

    def name_of(self, written: str) -> str | None:
        """Return the option that a written name stands for, None if the tool has none."""
        slug = written.lstrip("-").replace("-", "_")
        name = self.aliases.get(slug, slug)
        if name in self.names:
            return name
        if self.abbreviates and len(slug) > 1:
            begun = {
                self.aliases.get(each, each)
                for each in (*self.names, *self.aliases)
                if each.startswith(slug)
            }
            return begun.pop() if len(begun) == 1 else None
        return None


@cache
def option_table(tool: str) -> OptionTable:
    """Return the options of a tool, from the catalog, with those of the tool that it extends.

    It has not those of ``without``.
    """
    document = data_toml(f"tool_options/{tool}.toml")
    groups = document["options"]
    base = option_table(document["extends"]) if "extends" in document else None
    kinds = ("values", "lists", "switches")
    own = {name for group in groups for kind in kinds for name in group.get(kind, ())}
    without = own | set(document.get("without", ()))
    inherited = base.names - without if base else frozenset()

    def names(kind: str) -> frozenset[str]:
        of_base: frozenset[str] = getattr(base, kind) if base else frozenset()
        named = (name for group in groups for name in group.get(kind, ()))
        return frozenset(named) | (of_base & inherited)

    reasons = {
        name: group["reason"]
        for group in groups
        for kind in kinds
        for name in group.get(kind, ())
        if "reason" in group
    }
    if base:
        reasons = {name: base.reasons[name] for name in inherited & base.reasons.keys()} | reasons
    return OptionTable(
        title=document["title"],
        values=names("values"),
        switches=names("switches"),
        lists=names("lists"),
        aliases={
            **({name: to for name, to in base.aliases.items() if to in inherited} if base else {}),
            **document.get("aliases", {}),
        },
        reasons=reasons,
        abbreviates=document.get("abbreviates", False),
    )


@dataclass
class Arguments:
    """The words of a command as options by name, positional words, and unknown options.

    A repeated option has its last value; ``repeated`` are the sources of the earlier ones.
    """

    options: dict[str, Option] = field(default_factory=dict)
    positional: list[str] = field(default_factory=list)
    unknown: list[tuple[str, str]] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)


def read_arguments(words: list[str], table: OptionTable, *, launches: bool = False) -> Arguments:
    """Return the options of a command line.

    A launcher's options end at the program that it starts: that one and its arguments are the
    positional words.

    Raises:
        BadSettingError: an option that needs a value has none.
        BadRequestError: a word is a substitution.
    """
    found, at = Arguments(), 0
    refuse_many_settings(len(words))
    for word in words:
        refuse_substitution(word)
    while at < len(words):
        word = words[at]
        if not word.startswith("-") or word == "-" or NUMBER.fullmatch(word):
            if launches:
                found.positional = words[at:]
                break
            found.positional.append(word)
            at += 1
            continue
        if word == "--":
            found.positional += words[at + 1 :]
            break
        at += _parse_option(found, words, at, table)
    refused = REFUSED.get()
    found.options = {n: each for n, each in found.options.items() if each.source not in refused}
    return found


def refuse_substitution(word: str) -> None:
    """Refuse a word that only running a command would complete.

    Raises:
        BadRequestError: the word has a command substitution.
    """
    if SUBSTITUTION in word:
        raise BadRequestError(
            f"{shown(plain(word))!r} has a command substitution ($(…) or backticks): a pasted "
            "text is never run; write the value itself in its place",
            "text",
        )


def _parse_option(found: Arguments, words: list[str], at: int, table: OptionTable) -> int:
    """Record the option at a position, and return how many words it has."""
    written, joined, value = words[at].partition("=")
    name, is_on = table.name_of(written), True
    if name is None and "." in written and table.name_of(written.split(".")[0]):
        return _parse_dotted(found, words, at, table)
    slug = written.lstrip("-")
    if name is None and slug.startswith("no"):
        name = table.name_of(re.sub(r"^no[-_]", "", slug))
        is_on = name is None
    following = words[at + 1 :]
    if name is None:
        count = 1 + (not joined and _is_value(following[:1]))
        found.unknown.append((source_of(*words[at : at + count]), slug))
        return count
    values: list[str] = [value] if joined else []
    if not joined and name in table.lists:
        values = _leading_values(following)
    elif not joined and name in table.values and is_on:
        values = following[:1] if _is_value(following[:1]) else []
        if not values and written in REFUSED.get():
            return 1
        if not values:
            reason = f"it has no value: {table.title} takes one after it"
            raise BadSettingError(f"{written} {reason[3:]}", written, written, reason)
    elif not joined and following and following[0].lower() in STATES:
        values = following[:1]
    source = source_of(*words[at : at + 1 + (0 if joined else len(values))])
    text: str | None = " ".join(plain(each) for each in values) if values else None
    option = Option(
        name=name,
        value=text if is_on else "false",
        source=source,
        written=written,
        is_variable=any(is_variable(each) for each in values),
    )
    if source in REFUSED.get():
        return 1 + (0 if joined else len(values))
    if name in found.options:
        found.repeated.append(found.options[name].source)
    found.options[name] = option
    return 1 + (0 if joined else len(values))


def _parse_dotted(found: Arguments, words: list[str], at: int, table: OptionTable) -> int:
    """Record one key of a JSON option, such as ``--speculative-config.method mtp``.

    Keys of one option become one JSON object. Source: vLLM, FlexibleArgumentParser.
    """
    written, joined, value = words[at].partition("=")
    option, *path = written.split(".")
    name = table.name_of(option) or option
    values = [value] if joined else words[at + 1 : at + 2] if _is_value(words[at + 1 :]) else []
    used = 0 if joined else len(values)
    source = source_of(*words[at : at + 1 + used])
    if source in REFUSED.get():
        return 1 + used
    before = found.options.get(name)
    document = _json_object(before.value) if before else {}
    place = document
    for part in path[:-1]:
        inner = place.get(part)
        place[part] = inner = inner if isinstance(inner, dict) else {}
        place = inner
    place[path[-1]] = _json_value(plain(values[0])) if values else True
    found.options[name] = Option(
        name=name,
        value=json.dumps(document),
        source=f"{before.source} {source}" if before else source,
        written=option,
        is_variable=any(map(is_variable, values)) or bool(before and before.is_variable),
    )
    return 1 + used


def _json_object(text: object) -> dict[str, Any]:
    value = _json_value(str(text))
    return value if isinstance(value, dict) else {}


def _json_value(text: str) -> Any:  # noqa: ANN401 - as in JSON
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _is_value(words: list[str]) -> bool:
    return bool(words) and (not words[0].startswith("-") or bool(NUMBER.fullmatch(words[0])))


def _leading_values(words: list[str]) -> list[str]:
    count = next((at for at in range(len(words)) if not _is_value(words[at:])), len(words))
    return words[:count]


# What became of options and words, for the draft.


OWN = "own:"  # before a tool's own name that is also the common name of another setting
ALONE = "it has no effect without the option that it belongs to"


def read_options(draft: Draft, words: list[str], tool: str) -> Arguments:
    """Return a tool's options, after recording the words that are none of them."""
    table = option_table(tool)
    arguments = read_arguments(words, table)
    for source in arguments.repeated:
        draft.ignore(source, "the option stands there again, and the last one counts")
    for source, name in arguments.unknown:
        draft.reject(source, name, table.names | set(table.aliases), table.title)
    return arguments


def ignore_rest(draft: Draft, options: Options, tool: str) -> None:
    """Record the options that no field of a plan stands for, each with its reason."""
    reasons = option_table(tool).reasons
    for name, option in options.items():
        draft.ignore(option.source, reasons.get(name.removeprefix(OWN), ALONE))
    options.clear()


def ignore_words(draft: Draft, words: list[str]) -> None:
    """Record positional words that a tool does not read."""
    for word in words:
        variable = "$" in plain(word)
        reason = "a shell variable, which is not expanded" if variable else "no option before it"
        draft.ignore(source_of(word), reason)
