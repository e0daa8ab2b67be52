"""Detection of concurrent edits of one draft, by two tabs or two people.

Each form carries the version mark of its step as shown, and a page id. A page may overwrite its
own changes; it overwrites another page's changes only with the user's consent. A page numbers its
changes, so that a request that arrives after a later one writes nothing.
"""

from collections.abc import Mapping
from typing import Any

from webapp.core.clock import now
from webapp.core.ids import new_ulid
from webapp.core.stale import SEEN, changed_words, mark_of
from webapp.plans.models import Plan
from webapp.wizard.steps import STEPS

PAGE, OVER, TURN = "page", "over", "turn"
TURN_DIGITS = 9
Draft = dict[str, Any]


def step_mark(draft: Draft, step: str) -> str:
    """Return the version mark of a step's values; two steps depend on the goal as well."""
    goal = (draft.get("goal") or {}).get("goal")
    if step == "workload":
        return mark_of([goal, (draft.get("workload") or {}).get(goal)])
    if step == "hardware":
        return mark_of([goal, draft.get("hardware"), draft.get("pins")])
    return mark_of(draft.get(step))


def form_marks(plan: Plan, step: str, posted: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a form's hidden values; a form shown again with errors keeps its own."""
    if posted and posted.get(SEEN):
        return {"seen": posted[SEEN], "page": posted.get(PAGE, ""), "turn": str(_turn(posted))}
    return {"seen": step_mark(plan.draft, step), "page": new_ulid(), "turn": "0"}


def is_overtaken(
    plan: Plan, step: str, posted: Mapping[str, str], *, is_autosave: bool = False
) -> bool:
    """Return whether the same page has written the step after it sent this request.

    An autosave without a further change writes nothing either: it would change the revision that
    the user's next page has.
    """
    last = plan.edits.get(step) or {}
    if not posted.get(PAGE) or last.get("page") != posted[PAGE][:26]:
        return False
    turn, written = _turn(posted), int(last.get("turn", 0))
    return turn < written or (is_autosave and 0 < turn == written)


def _turn(posted: Mapping[str, str]) -> int:
    """Return the number of changes of a page when it sent a form; 0 without JavaScript."""
    text = posted.get(TURN, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= TURN_DIGITS else 0


def stale_words(plan: Plan, step: str, posted: Mapping[str, str], reader: str) -> str:
    """Return a sentence on who changed a step since the form was shown, or ""."""
    seen, mark = posted.get(SEEN, ""), step_mark(plan.draft, step)
    last = plan.edits.get(step) or {}
    is_own = bool(last) and (last.get("page"), last.get("mark")) == (posted.get(PAGE), mark)
    if not seen or posted.get(OVER) or seen == mark or is_own:
        return ""
    name = next(each.name for each in STEPS if each.slug == step).lower()
    what, at = f"The {name} of this draft was", last.get("at")
    return changed_words(what, str(last.get("by", "")), at, reader=reader)


def edit_note(plan: Plan, step: str, posted: Mapping[str, str], by: str) -> None:
    """Record on the plan who wrote a step, when, and from which page."""
    mark = step_mark(plan.draft, step)
    page = posted.get(PAGE, "")[:26]
    note = {"by": by, "at": now().isoformat(), "page": page, "mark": mark}
    plan.edits[step] = {**note, "turn": _turn(posted)}
