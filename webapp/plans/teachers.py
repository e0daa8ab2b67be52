"""The teacher of a distillation that a plan names: a model of its team, or one of the catalog."""

from collections.abc import Collection
from typing import Any

from django.db.models import Q

from planner.catalog.models import checkpoint_name, is_known_model
from runners.jobspec import ArtefactModel, FolderModel, HubModel
from runners.jobspec.base import StoredModel
from runners.plans.document import ModelChoice, PlanDocument
from runners.plans.refusals import DraftProblem
from runners.plans.weights import repository_of
from runners.plans.workloads import FinetuneWork
from webapp.accounts.models import Team
from webapp.hosts.models import Host, Pool
from webapp.modelhub.models import TeamModel
from webapp.plans.team_models import team_model_ref

FIELD = "teacher_model"


def teacher_name(document: PlanDocument) -> str:
    """Return the name of the teacher, "" of a plan without one."""
    values = document.workload
    is_taught = isinstance(values, FinetuneWork) and values.objective == "distillation"
    return values.teacher_model.strip() if is_taught and isinstance(values, FinetuneWork) else ""


def team_teacher(
    document: PlanDocument, team: Team, hosts: Collection[object] = ()
) -> TeamModel | None:
    """Return the team's model that is the teacher, by its id or its name.

    Of several of its name the newest one that ``hosts``, the ids of the plan's hosts, can load;
    without such the newest. None of a plan without a teacher, or with one of the catalog.

    Raises:
        DraftProblem: neither the team nor the catalog has it.
    """
    name = teacher_name(document)
    if not name:
        return None
    own = TeamModel.objects.filter(Q(pk=name) | Q(name=name), team=team)
    rows = sorted(
        own.select_related("host"),
        key=lambda each: (each.pk != name, each.host_id not in {None, *hosts}),
    )
    found = rows[0] if rows else None
    if found is None and not is_known_model(name):
        raise DraftProblem(
            f"The teacher {name} is no model of your team and none of the catalog. Add its "
            "repository or folder to the models of your team, or choose one of the catalog.",
            FIELD,
        )
    return found


def teacher_config(teacher: TeamModel | None) -> dict[str, Any] | None:
    """Return the config.json of a team's teacher, None for one of the catalog."""
    return teacher.stored_config if teacher else None


def teacher_ref(
    document: PlanDocument, teacher: TeamModel | None, host: Host, pool: Pool | None
) -> StoredModel | None:
    """Return a job's reference to the teacher, None of a plan without one.

    Raises:
        DraftProblem: its weights are on another host, or nowhere.
    """
    name = teacher_name(document)
    if not name:
        return None
    if teacher is None:
        own = checkpoint_name(name)  # an alias stands for a repository, which a job can load
        ref: object = repository_of(ModelChoice(source="catalog", catalog_id=own))
    else:
        ref = team_model_ref(teacher, host, pool)
    if not isinstance(ref, FolderModel | ArtefactModel | HubModel):
        raise DraftProblem(
            f"The teacher {name} has no weights that a job could load. Choose a model of your "
            "team with a repository or a folder, or one of the catalog with its repository.",
            FIELD,
        )
    return ref
