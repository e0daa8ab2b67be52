"""Who may do what with a job: practitioners with their own, operators with every job of a team."""

from dataclasses import dataclass

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest

from webapp.accounts.models import Membership, Role
from webapp.accounts.services import is_at_least, membership_of
from webapp.jobs.lookup import load_job
from webapp.jobs.models import FINAL_STATES, Job, JobState


@dataclass(frozen=True)
class AllowedActions:
    """The actions that a person may take on a job in its present state."""

    stop: bool = False
    clone: bool = False
    delete: bool = False
    abandon: bool = False  # if one of its hosts is unreachable

    def __bool__(self) -> bool:
        return self.stop or self.clone or self.delete


FOR_EVERYBODY = frozenset({"clone", "resume"})  # who may launch; the new job is their own


def refusal(membership: Membership | None, job: Job, action: str) -> str:
    """Return why a member's role does not permit ``action`` on a job; empty if it does."""
    if membership is None or not is_at_least(Role(membership.role), Role.PRACTITIONER):
        return f"To {action} a job you need the role Practitioner or higher."
    is_operator = is_at_least(Role(membership.role), Role.OPERATOR)
    if action not in FOR_EVERYBODY and not is_operator and job.owner_id != membership.user_id:
        return f"Only its owner or an operator can {action} this job."
    return ""


def allowed(membership: Membership | None, job: Job) -> AllowedActions:
    """Return the actions that a member may take on a job in its present state."""
    is_over = job.state in FINAL_STATES
    is_possible = {
        "stop": not is_over and job.state not in {JobState.DRAFT, JobState.STOPPING},
        "clone": True,
        "delete": is_over or job.state == JobState.DRAFT,
        "abandon": True,
    }
    return AllowedActions(
        **{name: may and not refusal(membership, job, name) for name, may in is_possible.items()}
    )


def job_for(request: HttpRequest, job_id: str, action: str) -> Job:
    """Return the job if the person may take ``action`` on it.

    Raises:
        PermissionDenied: the role is too low, or the job is someone else's.
    """
    job = load_job(request, job_id)
    if why := refusal(membership_of(request.user, job.team), job, action):
        raise PermissionDenied(why)
    return job
