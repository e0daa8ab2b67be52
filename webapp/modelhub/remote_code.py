"""Code of repositories that jobs may run: each allowed by an administrator, at one commit.

A repository whose architecture no engine has brings modules of its own. They run with the rights
of the host's agent, so that nothing runs that nobody has read: the job gets them of the allowed
commit alone, and a claim asks anew, so that a withdrawal holds for jobs that wait.
"""

from collections.abc import Collection, Iterable

from django.db import transaction

from runners.hub.repository import COMMIT
from runners.jobspec.base import REPOSITORY
from webapp.accounts.models import Team
from webapp.audit.models import event_record
from webapp.core.problems import InvalidProblem
from webapp.modelhub.models import TrustedCode

MOST = 500  # of a team
LONGEST_REASON = 300


def code_allow(*, team: Team, name: str, reason: str, by: str) -> TrustedCode:
    """Allow the code of a repository of Hugging Face, named org/name@commit; may be repeated.

    Raises:
        InvalidProblem: the name states no commit of 40 digits, the reason is too long, or the
            team has too many.
    """
    repository, _, commit = name.strip().partition("@")
    if not REPOSITORY.fullmatch(repository) or not COMMIT.fullmatch(commit):
        raise InvalidProblem(
            "model",
            f"The model is {name[:120]!r}; it must be org/name@COMMIT, of the Hugging Face Hub, "
            "with the 40 digits of the commit whose code you have read: a branch may change. The "
            "page of the repository's commits, and the log of a job that was refused, show them.",
        )
    if len(reason) > LONGEST_REASON:
        raise InvalidProblem(
            "reason",
            f"The reason has {len(reason)} characters and may have {LONGEST_REASON}: shorten it.",
        )
    with transaction.atomic():
        Team.objects.select_for_update(no_key=True).get(pk=team.pk)
        rows = TrustedCode.objects.filter(team=team)
        known: TrustedCode | None = rows.filter(repository=repository, commit=commit).first()
        if known is not None:
            return known
        if rows.count() >= MOST:
            raise InvalidProblem(
                "model", f"The team has allowed the code of {MOST} commits, the most: forbid some."
            )
        row: TrustedCode = TrustedCode.objects.create(
            team=team, repository=repository, commit=commit, reason=reason.strip(), allowed_by=by
        )
        event_record(row, "code.allowed", by, detail={"model": row.key, "reason": row.reason})
    return row


def code_forbid(*, row: TrustedCode, by: str) -> None:
    """Withdraw the permission; jobs that run already go on, others no longer get the code."""
    with transaction.atomic():
        event_record(row, "code.forbidden", by, detail={"model": row.key})
        row.delete()


def trusted_among(keys: Iterable[str], teams: Collection[str]) -> tuple[str, ...]:
    """Return the models, of those named org/name@commit, whose code each of the teams allowed.

    On a shared host both have a say: the team of the job, whose data the code reads, and that of
    the host, on which it runs.
    """
    named = set(keys)
    repositories = {each.partition("@")[0] for each in named}
    rows = TrustedCode.objects.filter(team__in=teams, repository__in=repositories)
    allowed = {(row.key, row.team_id) for row in rows} if named else set()
    return tuple(
        sorted(key for key in named if all((key, team) in allowed for team in set(teams)))
    )
