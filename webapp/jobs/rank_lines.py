"""The last output lines of a host, split by rank, and torchrun's own report.

A rank's lines carry its number, added by the job or by torch. torchrun's report follows after
a rank has failed, and names that rank.
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
    """The rank that torchrun reported as first to fail on its host, and its exit code."""

    rank: int
    exit_code: int | None

    @property
    def record(self) -> dict[str, Any]:
        """Return exit code and signal in the format of an exit record."""
        code = self.exit_code
        if code is not None and code < 0:
            return {"exit_code": None, "signal": -code}
        return {"exit_code": code, "signal": None}


class RankOutput(NamedTuple):
    """The last output of a host's processes: by rank, then torchrun's report."""

    by_rank: dict[int | None, list[str]]  # None: lines without a rank
    report: list[str]


def split_by_rank(lines: Sequence[str], *, is_one: bool = False) -> RankOutput:
    """Return the last lines of each rank; lines without a rank are under None.

    With ``is_one`` the host runs a single rank, to which those lines belong too.
    """
    start = _report_start(lines)
    numbers = {int(label[1]) for line in lines if (label := _LABEL.match(line))}
    unnumbered = numbers.pop() if is_one and len(numbers) == 1 else None
    by_rank: dict[int | None, list[str]] = {}
    report = []
    for index, line in enumerate(lines):
        label = _LABEL.match(line)
        if label:
            by_rank.setdefault(int(label[1]), []).append(line[label.end() :])
        elif index >= start:
            report.append(line)
        elif not _BANNER.match(line):
            by_rank.setdefault(unnumbered, []).append(line)
    if not any(line.strip() for line in by_rank.get(None, ["x"])):
        del by_rank[None]
    return RankOutput(by_rank, report)


def _report_start(lines: Sequence[str]) -> int:
    """Return the index where torchrun's report begins; ``len(lines)`` if there is none."""
    for index, line in enumerate(lines):
        if _TORCHRUN.match(line):
            return index
        if _RUN_PY.search(line):
            return max(0, index - 1)  # "Traceback (most recent call last):"
    return len(lines)


def first_failure(lines: Sequence[str]) -> Failure | None:
    """Return the rank that torchrun reported as first to fail; None if it reported none."""
    if _ROOT_CAUSE not in lines:
        return None
    after = lines[max(index for index, line in enumerate(lines) if line == _ROOT_CAUSE) :]
    rank = next((int(match[1]) for line in after if (match := _RANK.match(line))), None)
    code = next((int(match[1]) for line in after if (match := _EXIT_CODE.match(line))), None)
    return None if rank is None else Failure(rank, code)


def only_rank(said: RankOutput) -> int | None:
    """Return the rank number of a host that runs a single rank, from its output."""
    ranks = [rank for rank in said.by_rank if rank is not None]
    return ranks[0] if len(ranks) == 1 else None
