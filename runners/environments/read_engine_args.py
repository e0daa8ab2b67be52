"""Read the arguments of an engine's release from its own parser, as data for the checks.

``python -m runners.environments.read_engine_args ENGINE PYTHON > FILE`` asks the interpreter
``PYTHON`` of an environment that has the engine; no GPU is needed. The files lie in
``runners/jobspec/arguments``. Anew after a change of the pins in ``ENGINE.txt``.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

from runners.jobspec.engines import EngineName
from runners.shared.log_text import last_line, lines_of

SECONDS = 300.0
Option = dict[str, Any]

# The parser of argparse, as JSON: what each type accepts is found by trying it.
_ARGPARSE = """
import argparse, enum, json, sys
from importlib.metadata import version

TRIED = {
    "text": "no-such.value", "float": "1.5", "int": "3", "size": "1k",
    "json": '{"a": 1}', "object": "{}",
}

def accepts(action):
    if action.type is None or action.type is str:
        return ["text"]
    if action.type in (int, float):
        return [action.type.__name__]
    kinds = []
    for kind, text in TRIED.items():
        try:
            action.type(text)
        except Exception:
            continue
        kinds.append("json" if kind == "object" else kind)
    if "text" in kinds:
        return ["text"]
    return ["json"] if {"json", "float", "int"} <= {*kinds} else list(dict.fromkeys(kinds))

def plain(value):
    if isinstance(value, enum.Enum):
        value = value.value
    is_plain = isinstance(value, (str, int, float, bool)) and value != argparse.SUPPRESS
    return value if is_plain else None

def option(action):
    words = action.help or ""
    return {
        "names": list(action.option_strings),
        "nargs": action.nargs,
        "accepts": accepts(action) if action.nargs != 0 else [],
        "choices": [str(plain(each)) for each in action.choices or ()],
        "default": plain(action.default),
        "help": words,
    }

def dump(parser, package):
    actions = [each for each in parser._actions if each.option_strings]
    told = {"release": version(package), "options": [option(each) for each in actions]}
    sys.stdout.write("\\nDATA" + json.dumps(told) + "\\n")
"""
_SCRIPTS: dict[EngineName, str] = {
    "vllm": _ARGPARSE
    + """
from vllm import platforms
from vllm.platforms.cpu import CpuPlatform
platforms._current_platform = CpuPlatform()  # without a GPU it finds none, and stops
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
dump(make_arg_parser(FlexibleArgumentParser()), "vllm")
""",
    "sglang": _ARGPARSE
    + """
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
dump(parser, "sglang")
""",
    "llamacpp": """
from importlib.metadata import version
import xllamacpp
from runners.jobs.serve.llamacpp.arguments import read_arguments
print("RELEASE", version("xllamacpp"), flush=True)
read_arguments(xllamacpp.CommonParams(), ["--help"])
""",
}
_SOURCES: dict[EngineName, str] = {
    "vllm": "make_arg_parser of vllm/entrypoints/launchers/cli_args.py, imported from the wheel",
    "sglang": "ServerArgs.add_cli_args of sglang/srt/server_args.py, imported from the wheel",
    "llamacpp": "the help of llama.cpp's server parser in the library of xllamacpp",
}
_DEPRECATED = re.compile(r"deprecated|(is|has been) removed|will be removed", re.IGNORECASE)


class Reading(NamedTuple):
    """What an engine's parser says: its release and its options."""

    release: str
    options: list[Option]


def read_engine(engine: EngineName, python: str) -> Reading:
    """Return the arguments of the release that an interpreter has.

    Raises:
        RuntimeError: the engine cannot be imported there; the text has its last words.
    """
    command = [python, "-c", _SCRIPTS[engine]]
    result = subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)
    lines = lines_of(result.stdout)
    if release := next((each for each in lines if each.startswith("RELEASE ")), ""):
        return Reading(release.removeprefix("RELEASE "), list(help_options(lines)))
    if data := next((each for each in lines if each.startswith("DATA")), ""):
        told = json.loads(data.removeprefix("DATA"))
        return Reading(told["release"], [*_argparse_options(told["options"])])
    raise RuntimeError(f"{python} does not read {engine}: {last_line(result.stderr)}")


def _argparse_options(actions: list[Option]) -> Iterator[Option]:
    for action in actions:
        nargs = action["nargs"]
        yield _option(
            action["names"],
            1 if nargs is None else nargs,
            action["accepts"],
            action["choices"],
            action["default"],
            is_deprecated=bool(_DEPRECATED.search(action["help"])),
        )


def _option(
    names: list[str],
    values: int | str,
    accepts: list[str],
    choices: list[str],
    default: object = None,
    *,
    is_deprecated: bool = False,
) -> Option:
    """Return an option as it is stored; what is usual is left out."""
    fields = {
        "names": names,
        "values": values,
        "accepts": accepts if values and not choices else [],
        "choices": choices,
        "default": default,
        "is_deprecated": is_deprecated,
    }
    return {name: value for name, value in fields.items() if value not in (None, [], False, "")}


# The help of llama.cpp: "-t, --threads N   words"; more words in the lines that follow.

_HEAD = 40  # characters before the words
_NAME = re.compile(r"-{1,2}[A-Za-z][A-Za-z0-9-]*")
_BRACES = re.compile(r"[{<\[]([^{}<>\[\]]+)[}>\]]")
_ALLOWED = re.compile(r"allowed values: ([\w, ]+)")
_DEFAULT = re.compile(r"\(default: ([^,()]+)\)")
_USUAL_NUMBER = re.compile(r"default: (-?\d[\d.]*)")
_NUMBERS = frozenset({"N", "PORT", "INDEX"})
_FILES = re.compile(r"FNAME|FILE|PATH|DIR|URL")


def help_options(lines: Iterable[str]) -> Iterator[Option]:
    """Yield the options in the help of llama.cpp's server; removed ones are left out."""
    head, words = "", ""
    for line in [*lines, "-----"]:
        if not line.startswith("-"):
            words += f" {line.strip()}"
            continue
        if head and "argument has been removed" not in words:
            yield _help_option(head, " ".join(words.split()))
        is_short = len(line) > _HEAD and line[_HEAD - 1] == " " and line[_HEAD] != " "
        head, words = (line[:_HEAD], line[_HEAD:]) if is_short else (line, "")
        head = "" if line.startswith("-----") else head


def _help_option(head: str, words: str) -> Option:
    names, rest = [], head.strip()
    while match := _NAME.match(rest):
        names.append(match[0])
        rest = rest[match.end() :].lstrip()
        if not rest.startswith(","):
            break
        rest = rest[1:].lstrip()
    choices, takes = _choices(rest, words), rest.split()
    has_several = len(takes) > 1 and rest.isupper()  # START END
    return _option(
        names,
        len(takes) if has_several else int(bool(rest)),
        [_kind(rest, words)],
        choices,
        found[1] if (found := _DEFAULT.search(words)) else None,
        is_deprecated=bool(_DEPRECATED.search(words)),
    )


def _kind(rest: str, words: str) -> str:
    """Return what the parser reads: a number N is a whole one if its default is."""
    if _FILES.search(rest):
        return "file"
    if rest == "JSON":
        return "json"
    if rest not in _NUMBERS or "'" in words:  # such as 'auto' in place of a number
        return "text"
    usual = _USUAL_NUMBER.search(words)
    return "int" if rest != "N" or (usual and "." not in usual[1]) else "float"


def _choices(rest: str, words: str) -> list[str]:
    if found := _ALLOWED.search(words):
        return [each.strip() for each in found[1].split(",") if each.strip()]
    braces = _BRACES.fullmatch(rest)
    if braces is None or "..." in rest:
        return []
    parts = re.split(r"[|,]", braces[1])
    is_list = len(parts) > 1 and all(re.fullmatch(r"[\w+-]+", each) for each in parts)
    return parts if is_list else []


def main() -> int:
    """Print the arguments of an engine as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=[*_SCRIPTS])
    parser.add_argument("python", help="an interpreter that has the engine")
    given = parser.parse_args()
    engine: EngineName = given.engine
    release, options = read_engine(engine, given.python)
    head = {
        "engine": engine,
        "release": release,
        "read_on": datetime.now(UTC).date().isoformat(),
        "source": _SOURCES[engine],
    }
    lines = ",\n".join(f"  {json.dumps(each, ensure_ascii=False)}" for each in options)
    sys.stdout.write(f'{json.dumps(head)[:-1]}, "options": [\n{lines}\n]}}\n')
    return 0


if __name__ == "__main__":
    sys.exit(main())
