"""Replies about plans, versions, verdicts, exports, imports and post-mortems."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from planner.specs.estimate import PlanAnswer, PlanRequest
from runners.client.replies.base import Open, PageReply, Reply

VerdictState = Literal[
    "fits", "tight", "narrow", "slow", "long", "too-long", "over-context", "does-not-fit",
    "refused", "computed", "draft", "incomplete",
]  # fmt: skip


class PlanSummary(Reply):
    """A plan in a list."""

    id: str
    name: str
    state: Open[Literal["draft", "computed"]]
    verdict: Open[VerdictState]
    version: int | None
    series: str
    team: str
    owner: str
    saved_at: Annotated[
        datetime, Field(description="Of a plan that is not kept: when it was made")
    ]
    url: str


class PlanPage(PageReply[PlanSummary]):
    """A page of plans."""


class VerdictReply(Reply):
    """The verdict in words, as on the plan's page."""

    tone: str
    state: str
    sentence: str
    detail: str
    warnings: list[str]


class SuggestionReply(Reply):
    """A change of the plan that the planner proposes."""

    number: int
    sentence: str
    changes: dict[str, Any]


class LaunchNote(Reply):
    """Whether the plan can be launched, and what that would do."""

    can: bool
    title: str
    text: str


class PlanReply(PlanSummary):
    """A plan with its document, its question for the planner, and the planner's answer.

    ``answer`` is null if the draft cannot be planned; ``problem`` then says why. ``notes`` says
    what else the last change changed.
    """

    revision: int
    document: dict[str, Any]
    request: PlanRequest | None
    answer: PlanAnswer | None
    problem: str
    verdict_words: VerdictReply
    launch: LaunchNote
    suggestions: list[SuggestionReply]
    is_outdated: bool
    notes: list[str] = []


class Imported(Reply):
    """A draft of pasted text, and what became of each setting."""

    plan: PlanReply
    kind: str
    launch: Annotated[
        dict[str, Any],
        Field(description="What the text states of a launch: the body of launch_plan, or nothing"),
    ]
    understood: list[dict[str, Any]]
    ignored: list[dict[str, Any]]
    unknown: list[dict[str, Any]]
    missing: list[str]


class VersionReply(Reply):
    """One saved version of a plan, and what changed against the one it came from."""

    id: str
    version: Annotated[int, Field(description="From 1")]
    name: str
    verdict: Open[VerdictState]
    saved_by: str
    saved_at: datetime
    words: Annotated[str, Field(description="Where it comes from, if no change says it")]
    changes: Annotated[list[str], Field(description="Such as “Context: 1024 → 2048”")]
    num_jobs: Annotated[int, Field(description="Launched from this version, and not deleted")]


class VersionPage(PageReply[VersionReply]):
    """A page of a plan's versions."""


class FormatReply(Reply):
    """A format that can express the plan, with notes on what it leaves out."""

    key: str
    title: str
    file_name: str
    notes: list[str]


class PlanFormats(Reply):
    """The formats that can express a plan's first proposal."""

    plan: str
    formats: list[FormatReply]


class ExportReply(FormatReply):
    """A plan in another tool's format, with the script that measures its predictions."""

    text: str
    measure: str


class ChangeReply(Reply):
    """A change with which a job that ran out of memory would fit."""

    number: int
    title: str
    changes: dict[str, Any]


class PostMortem(Reply):
    """Why a job failed: its exit, its last lines, and the smallest changes that would fit."""

    exit_code: int | None
    signal: int | None
    last_lines: list[str]
    changes: list[ChangeReply]
