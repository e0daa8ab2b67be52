"""Export of a plan: text, notes on what the format cannot express, and a measuring script."""

import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from planner.exports.case import ExportCase
from planner.exports.claims import claim_words

Notes = tuple[str, ...]
LINE_CHARACTERS = 96
PLAIN = r"[\w+=:,./-]*"
OWN_VARIABLE = re.compile(rf"{PLAIN}(?:\$(?:MASTER_ADDR|NODE_RANK|@){PLAIN})+", re.ASCII)


@dataclass(frozen=True)
class Export:
    """A plan in another tool's format; ``notes`` state assumptions and omissions."""

    key: str
    title: str
    file_name: str
    text: str
    notes: Notes
    measure: str


@dataclass(frozen=True)
class Format:
    """An export format; ``comment`` is its comment prefix, None without comments."""

    key: str
    title: str
    file_name: str
    body: Callable[[ExportCase], str]
    notes: Callable[[ExportCase], Notes]
    comment: str | None = "# "

    def text(self, case: ExportCase, more: Notes = ()) -> str:
        """Return the complete file for a plan."""
        return self.with_body(case, self.body(case), (*more, *self.notes(case)))

    def with_body(self, case: ExportCase, body: str, notes: Notes) -> str:
        """Return the complete file: header with prediction and notes, then the body."""
        if self.comment is None:
            return body
        return with_head(body, head_lines(case, notes), self.comment)


def head_lines(case: ExportCase, notes: Notes) -> list[str]:
    """Return the header lines of an export: model, hardware, prediction, notes."""
    device = case.device.name or case.device.id
    used = case.hardware if case.devices > 1 else device
    return [
        f"{case.model} on {used}, planned for {case.plan.engine}",
        f"predicted: {claim_words(case)}",
        *(f"note: {note}" for note in notes),
    ]


def with_head(body: str, lines: Iterable[str], comment: str) -> str:
    """Return a text with comment lines at its top, below a shebang if there is one."""
    # A line break in a name must not end the comment and start a command.
    head = "".join(f"{comment}{' '.join(line.splitlines())}\n" for line in lines)
    if body.startswith("#!"):
        shebang, rest = body.split("\n", 1)
        return f"{shebang}\n{head}{rest}"
    return head + body


def shell_lines(command: list[str]) -> str:
    """Return a command as shell text, one option per line; only known variables are expanded.

    Any other text with a dollar comes from a name or a path and is quoted literally.
    """
    lines: list[str] = []
    for word in command:
        quoted = f'"{word}"' if OWN_VARIABLE.fullmatch(word) else shlex.quote(word)
        starts = word.startswith("--") or not lines or "=" in lines[-1].split()[-1]
        value_fits = not starts and len(lines[-1]) + len(quoted) < LINE_CHARACTERS
        if value_fits:
            lines[-1] += f" {quoted}"
        else:
            lines.append(quoted)
    return " \\\n  ".join(lines) + "\n"
