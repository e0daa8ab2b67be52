"""Models of a team as a job refers to them, and those that may draft for another one."""

from planner.specs.model import ModelSpec
from runners.jobspec import ArtefactModel, FolderModel, ModelRef, RandomModel
from runners.plans.document import ModelChoice
from runners.plans.launch_case import DraftModel
from runners.plans.refusals import DraftProblem
from runners.plans.weights import repository_of
from webapp.accounts.models import Team
from webapp.hosts.models import Host, Pool
from webapp.modelhub.models import TeamModel

MOST_OFFERED = 50


def team_model_ref(model: TeamModel, host: Host | None, pool: Pool | None) -> ModelRef:
    """Return a job's reference to a team model.

    Raises:
        DraftProblem: the model's weights are on another host.
    """
    if model.host_id and host and model.host_id != host.pk:
        raise DraftProblem(
            f"The weights of {model.name} are on another host. Choose {model.host}, or copy the "
            f"model's folder to {pool.name if pool else host.name}.",
            "host",
        )
    if model.source == "job":
        return ArtefactModel(attempt_id=model.attempt_id, name=model.artefact_name or "model")
    if model.source == "folder":
        return FolderModel(path=model.path)
    if model.source == "hub":
        named = ModelChoice(
            source="hub", repository=model.repository, revision=model.revision or None
        )
        return repository_of(named) or RandomModel(config=model.config)
    return RandomModel(config=model.config)


def draft_models_for(
    host: Host, model: ModelRef, shape: ModelSpec | None
) -> tuple[DraftModel, ...]:
    """Return the team's other models on a host with the same vocabulary size."""
    if shape is None or isinstance(model, RandomModel):
        return ()
    rows = TeamModel.objects.filter(team=host.team_id, host=host).exclude(source="config")
    alike = [each for each in rows if each.config.get("vocab_size") == shape.vocab_size]
    candidates = [(each, team_model_ref(each, host, None)) for each in alike]
    return tuple(
        DraftModel(each.pk, each.name, ref)
        for each, ref in candidates
        if ref != model and isinstance(ref, ArtefactModel | FolderModel)
    )[:MOST_OFFERED]


def team_model_id(ref: ModelRef, team: Team) -> str:
    """Return the id of the team's model that a job's spec refers to, "" if it is gone."""
    rows = TeamModel.objects.filter(team=team).exclude(source="config")
    same = (each for each in rows if team_model_ref(each, each.host, None) == ref)
    return str(next((each.pk for each in same), ""))
