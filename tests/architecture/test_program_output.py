"""What programs print goes through one reader, and a refusal says more than a library's words."""

import ast
import re
from functools import cache

from webapp.boot.suite import ROOT

# Lines that split, decode or cut what a program printed.
READS = re.compile(
    r"\b(?:stdout|stderr|output|errors|printed)\b[^\n=\"']*"
    r"(?:\.splitlines\(|\.decode\(|\.split\(b?\"\\n|\[-?\w*:-?\w*\])"
)
READER = re.compile(r"\b(lines_of|last_line|plain|shortened)\(")  # runners/shared/log_text.py
FUNCTION = re.compile(r"^ *(?:async )?def (\w+)", re.MULTILINE)
# What is printed and yet no text to be shown: where, and what it is.
OTHER_READERS = {
    "runners/jobs/folder_query.py:_run": "one line of llama.cpp's tool, cut within a sentence",
    "runners/jobs/folder_query.py:device_memory": "the table of llama.cpp's tool",
    "runners/jobs/folder_query.py:fitted_arguments": "the arguments of llama.cpp's tool",
    "webapp/bench/layouts.py:_output_of": "JSON lines of the project's own bench",
    "webapp/bench/long_history.py:_measured": "JSON lines of the project's own bench",
    "webapp/bench/memory.py:measure_memory": "JSON lines of the project's own bench",
    "webapp/bench/peers.py:answer_of": "JSON lines of a planner's answer",
    "webapp/bench/peers.py:cohort_rows": "JSON lines of a planner's answers",
    "webapp/bench/site.py:call": "JSON lines of the project's own bench",
    "webapp/core/problems.py:invalid": "faults of a request, no program's",
    "webapp/operations/management/commands/bench.py:_module_figures": "JSON lines of the own bench",
}
# Refusals that hand on what a library said: where, and why that is complete.
COMPLETE = {
    "runners/hub/s3_program.py": "the callers name the address, the store and the way out",
    "runners/jobs/chat_template.py": "a template's own words; the callers name the file",
    "runners/shared/addresses.py": "the callers name the variable or the field",
}


CAUGHT = "(error|refusal|problem|failure|reason|type)"
HANDED_ON = re.compile(  # of the files that are parsed, for parsing all takes seconds
    rf"\b(str|repr)\({CAUGHT}\)|\bf\"\{{{CAUGHT}\b|\b{CAUGHT}\.(strerror|msg)\b"
)


@cache
def sources() -> dict[str, str]:
    paths = [path for name in ("runners", "webapp") for path in (ROOT / name).rglob("*.py")]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def test_every_reader_of_a_programs_output_is_the_one_reader():
    found = set()
    for name, source in sources().items():
        if name == "runners/shared/log_text.py":
            continue
        for read in READS.finditer(source):
            begin, end = source.rfind("\n", 0, read.start()), source.find("\n", read.end())
            if not READER.search(source, begin, end):
                function = FUNCTION.findall(source, 0, read.start())[-1:]
                found.add(f"{name}:{''.join(function)}")
    assert found == set(OTHER_READERS)


def test_no_program_ends_its_reader_by_a_byte():
    """Text in another encoding is shown as it can be; a strict reader raises, or leaves a pipe."""
    for name, source in sources().items():
        calls = ast.walk(ast.parse(source)) if "text=True" in source else ()
        for node in calls:
            if not isinstance(node, ast.Call):
                continue
            keywords = {keyword.arg for keyword in node.keywords}
            assert "text" not in keywords or "errors" in keywords, f"{name}:{node.lineno}"


def is_bare(message: ast.expr, caught: str | None) -> bool:
    """Return whether a message is only what was caught: str(error), f"{error}", error.strerror."""
    if isinstance(message, ast.Attribute) and message.attr not in {"strerror", "msg", "__name__"}:
        return False
    if isinstance(message, ast.Subscript | ast.Attribute):
        return is_bare(message.value, caught)
    if isinstance(message, ast.Call) and isinstance(message.func, ast.Name):
        is_text = message.func.id in {"str", "repr", "type"}
        return is_text and any(is_bare(each, caught) for each in message.args)
    if isinstance(message, ast.JoinedStr):
        texts = [each.value for each in message.values if isinstance(each, ast.Constant)]
        values = [each for each in message.values if isinstance(each, ast.FormattedValue)]
        says_more = any(re.search(r"\w", text) for text in texts)
        return not says_more and all(is_bare(each.value, caught) for each in values)
    return isinstance(message, ast.Name) and message.id == caught


def test_a_refusal_of_a_host_names_more_than_what_a_library_said():
    """What the project's own errors say is complete: they are refusals of this test too."""
    hosts = {name: source for name, source in sources().items() if name.startswith("runners/")}
    own = set(re.findall(r"^class (\w+)", "\n".join(hosts.values()), re.MULTILINE))
    parsed = {name: ast.parse(text) for name, text in hosts.items() if HANDED_ON.search(text)}
    bare = set()
    for name, handler in ((key, node) for key in parsed for node in ast.walk(parsed[key])):
        if not isinstance(handler, ast.ExceptHandler) or not handler.type:
            continue
        kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        if all(isinstance(each, ast.Name) and each.id in own for each in kinds):
            continue
        for node in ast.walk(handler):
            raised = node.exc if isinstance(node, ast.Raise) else None
            is_refusal = isinstance(raised, ast.Call) and ast.unparse(raised.func) in own
            if is_refusal and any(is_bare(each, handler.name) for each in raised.args):
                bare.add(name)
    assert bare == set(COMPLETE)
