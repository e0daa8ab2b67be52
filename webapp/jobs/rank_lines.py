"""The last words of a host's ranks, told apart, and what torchrun reported of its own.

A rank's lines carry its number, from the job itself or from torch. What torchrun writes once
a rank has failed comes after them and says which rank that was.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

_LABEL = re.compile(r"^\[rank ?([0-9]{1,6})\]:? ?")
_TORCHRUN = re.compile(r"^[WE][0-9]{4} .*torch/distributed/elastic/")
_RUN_PY = re.compile(r'^  File "<frozen runpy>"|torch/distributed/run\.py", line')
_BANNER = re.compile(r"^\*{20,}$|^Setting OMP_NUM_THREADS environment variable")
_ROOT_CAUSE = "Root Cause (first observed failure):"
_RANK = re.compile(r"^ +rank +: ([0-9]{1,6}) ")
_EXIT_CODE = re.compile(r"^ +exitcode +: (-?[0-9]{1,4}) ")


class Failure(NamedTuple):
    """The rank that torchrun saw fail first on its host, and how it ended."""

    rank: int
    exit_code: int | None

    @property
    def record(self) -> dict[str, Any]:
        """Return exit code and signal as an exit record has them."""
        code = self.exit_code
        if code is not None and code < 0:
            return {"exit_code": None, "signal": -code}
        return {"exit_code": code, "signal": None}


class Said(NamedTuple):
    """What a host's processes wrote last: by rank, then torchrun's report."""

    by_rank: dict[int | None, list[str]]  # None: lines without a number
    report: list[str]


def told_apart(lines: Sequence[str], *, is_one: bool = False) -> Said:
    """Return the last lines of each rank; a line without a number is kept under None.

    With ``is_one`` the host runs a single rank, which then wrote those lines too.
    """
    start = _report_start(lines)
    numbers = {int(found[1]) for line in lines if (found := _LABEL.match(line))}
    unnumbered = numbers.pop() if is_one and len(numbers) == 1 else None
    by_rank: dict[int | None, list[str]] = {}
    report = []
    for at, line in enumerate(lines):
        found = _LABEL.match(line)
        if found:
            by_rank.setdefault(int(found[1]), []).append(line[found.end() :])
        elif at >= start:
            report.append(line)
        elif not _BANNER.match(line):
            by_rank.setdefault(unnumbered, []).append(line)
    if not any(line.strip() for line in by_rank.get(None, ["x"])):
        del by_rank[None]
    return Said(by_rank, report)


def _report_start(lines: Sequence[str]) -> int:
    """Return where torchrun's own report begins; past the end where there is none."""
    for at, line in enumerate(lines):
        if _TORCHRUN.match(line):
            return at
        if _RUN_PY.search(line):
            return max(0, at - 1)  # "Traceback (most recent call last):"
    return len(lines)


def first_failure(lines: Sequence[str]) -> Failure | None:
    """Return which rank of its host torchrun saw fail first; None where it did not say."""
    if _ROOT_CAUSE not in lines:
        return None
    after = lines[max(at for at, line in enumerate(lines) if line == _ROOT_CAUSE) :]
    rank = next((int(found[1]) for line in after if (found := _RANK.match(line))), None)
    code = next((int(found[1]) for line in after if (found := _EXIT_CODE.match(line))), None)
    return None if rank is None else Failure(rank, code)


def only_rank(said: Said) -> int | None:
    """Return the number of a host's one rank, as its own lines say it."""
    ranks = [rank for rank in said.by_rank if rank is not None]
    return ranks[0] if len(ranks) == 1 else None
