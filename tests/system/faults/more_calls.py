"""What the desk can make for callers that know something: one thing of each kind an address names.

Imported after ``django.setup()``, in the desk's own process.
"""

from collections.abc import Callable
from typing import Any

from tests.system.faults import calls, laws
from webapp.accounts.models import Membership
from webapp.accounts.tokens import token_make
from webapp.datasets.models import Dataset
from webapp.hosts.models import RefusedMessage
from webapp.hosts.services import token_create
from webapp.jobs.artefacts import folder_of
from webapp.jobs.models import Artefact, Attempt, Job
from webapp.wizard.drafts import draft_begin


def things(job: str) -> dict[str, Any]:
    """Return what a caller may know of a job, as parts of addresses and of bodies."""
    row = Job.objects.get(pk=job)
    attempt = row.current_attempt
    artefact, _ = Artefact.objects.update_or_create(
        attempt=attempt, name="model",
        defaults={"kind": "model", "total_bytes": 5, "files": {"a": 2, "b": 3}, "sha256": {},
                  "is_complete": False},
    )  # fmt: skip
    folder_of(artefact).mkdir(parents=True, exist_ok=True)
    (folder_of(artefact) / "a").write_bytes(b"{}")
    plan = draft_begin(team=row.team, owner=row.owner, preset="demo", model=None)
    data, _ = Dataset.objects.get_or_create(
        team=row.team, name="a.jsonl", sha256="0" * 64,
        defaults={"size_bytes": 2, "num_records": 2, "format": "text"},
    )  # fmt: skip
    _, token = token_create(team=row.team, by=None, name="Next")
    return {
        "path": {
            "attempt_id": attempt.pk, "dataset_id": data.pk, "name": "model", "path": "b",
            "plan_id": plan.pk, "key": "torchrun", "job_id": row.pk,
            "slug": attempt.host.slug, "device_id": attempt.host.devices.first().pk,
            "pool_id": row.pool_id, "model_id": "meta-llama/Llama-3.1-8B", "number": 0,
        },
        "body": {
            "token": token, "fence": attempt.fence, "attempt_id": attempt.pk,
            "boot_id": "boot-1", "claim_id": "folder-1",
        },
    }  # fmt: skip


def person_token(name: str) -> str:
    """Return a new access token of a person who may do everything in the team."""
    member = Membership.objects.select_related("user", "team").get(user__username=name)
    member.role = "admin"
    member.save()
    return token_make(team=member.team, by=member.user, name="contract", scope="admin")[1]


def events_missing(slugs: list[str]) -> list[Any]:
    """Return the attempts of some hosts whose stored events have a gap, one twice, or too many."""
    own = set(Attempt.objects.filter(host__slug__in=slugs).values_list("pk", flat=True))
    return [each for each in laws.contiguous_events() if each[0] in own]


def newest_job(slug: str) -> str:
    """Return the newest job that a host was given, or nothing."""
    return (
        Job.objects.filter(requested_host__slug=slug)
        .order_by("-pk")
        .values_list("pk", flat=True)
        .first()
        or ""
    )


def refusals(slug: str) -> dict[str, int]:
    """Return what was refused of a host by reason; a reason of the server's own is a fault."""
    rows = RefusedMessage.objects.filter(host__slug=slug)
    return {f"{row.kind}: {row.reason}": row.count for row in rows}


CALLS: dict[str, Callable[..., Any]] = calls.CALLS | {
    call.__name__: call for call in (things, person_token, events_missing, newest_job, refusals)
}
