"""Repositories of the Hub that a plan names: their commit, their content, who may read them.

The site asks the hub when a model is named and when a job is launched, never to show a page. Where
it does not reach the hub, the host decides: it may have the files, or a mirror.
"""

import dataclasses
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from django.core.cache import cache

from planner.catalog.models import model_from_config
from planner.specs.base import PlannerError
from runners.hub.names import parse, reason_of
from runners.hub.repository import COMMIT, RepositoryName
from runners.hub.settings import (
    HubSettings,
    HubSettingsError,
    from_environment,
    usual_hub,
)
from runners.jobspec import HubData, HubModel, MixedData, ModelSpec, TrainSpec
from runners.jobspec.base import HubName
from runners.jobspec.references import Reference, with_references
from runners.plans.document import ModelChoice
from webapp.accounts.models import Team
from webapp.accounts.secrets import secrets_open
from webapp.core.display import capitalised, sentence
from webapp.core.problems import InvalidProblem

ASK_SECONDS = 5.0
KEPT_SECONDS = 300


class Repository(NamedTuple):
    """A repository as the hub describes it: its commit, and its config.json if it was read."""

    name: str
    commit: str
    config: dict[str, Any]


class RepositoryProblem(InvalidProblem):
    """A repository cannot be planned with; ``sentence`` says why and what to do."""

    def __init__(self, words: str, field: str = "model.repository") -> None:
        super().__init__(
            "repository",
            f"The field {field} is not valid: {words}",
            errors=[{"field": field, "message": words}],
        )
        self.sentence = words


class UnreachableError(Exception):
    """The site does not reach the hub; the message says why."""


def with_config(given: ModelChoice, team: Team) -> ModelChoice:
    """Return a model of the Hub with its commit and its config.json as the hub has them.

    A config that is given stays where the site does not reach the hub.

    Raises:
        RepositoryProblem: the name is none, the hub refuses it or has no such repository, the
            repository has not the GGUF file or type that is named, or the planner does not know
            its family; the field is ``model.repository``.
        UnreachableError: the site does not reach the hub, and no config is given.
    """
    name = checked_name(given)
    try:
        found = _read(dataclasses.replace(name, revision=given.revision or name.revision), team)
    except UnreachableError:
        if not given.config:
            raise
        found = Repository(name.repository, given.revision or "", given.config)
    try:
        model_from_config(found.config)
    except PlannerError as error:
        raise RepositoryProblem(f"{found.name}: {sentence(error.message)}") from error
    return given.with_values(source="hub", revision=found.commit or None, config=found.config)


def checked_name(given: ModelChoice) -> RepositoryName:
    """Return the parts of a model's repository.

    Raises:
        RepositoryProblem: the text names none; the field is ``model.repository``.
    """
    try:
        return parse(given.repository or "")
    except PlannerError as error:
        raise RepositoryProblem(sentence(reason_of(error))) from error


def is_repository(text: str) -> bool:
    """Return whether a text has the form of a repository's name."""
    try:
        return bool(parse(text))
    except PlannerError:
        return False


def _read(name: RepositoryName, team: Team) -> Repository:
    key = "hub:" + hashlib.sha256(f"{team.pk} {name}".encode()).hexdigest()
    known: Repository | None = cache.get(key)
    if known is None:
        known = _ask(name, team, has_config=True)
        cache.set(key, known, KEPT_SECONDS)
    return known


def hub_of(named: HubModel | HubData) -> HubName:
    """Return the hub that a job downloads from: of a model without one the site's usual one."""
    if isinstance(named, HubData):
        return "huggingface"
    return named.hub or usual_hub(os.environ)


def at_a_commit(spec: ModelSpec, team: Team) -> ModelSpec:
    """Return a spec whose repositories are at the commit that the hub has now.

    Raises:
        RepositoryProblem: the hub refuses a repository: it has none of the name, or access to it;
            or a data set has no files of the split that jobs read.
    """
    teacher = getattr(spec, "teacher", None)

    def resolved(named: Reference) -> Reference:
        if not isinstance(named, HubModel | HubData):
            return named
        original = named
        if isinstance(named, HubModel) and not named.hub:
            named = named.model_copy(update={"hub": hub_of(named)})
        if isinstance(named, HubModel) and COMMIT.fullmatch(named.revision):
            return named
        try:
            if isinstance(named, HubData):
                commit = _ask_for_data(named, team, _field_of(named, spec))
            else:
                name = RepositoryName(named.repository, named.revision, named.file, named.hub)
                field = "workload.teacher_model" if original is teacher else "model.repository"
                commit = _ask(name, team, has_config=False, field=field).commit
        except UnreachableError:
            return named
        return named.model_copy(update={"revision": commit})

    return with_references(spec, resolved)


def _ask(
    name: RepositoryName, team: Team, *, has_config: bool, field: str = "model.repository"
) -> Repository:
    """Return the repository; a GGUF file or type that is named is one of its own.

    ``field`` names it in the plan.
    """
    # Here: the hub's library takes half a second to import.
    from runners.hub.listing import check_access, look_up, read_config
    from runners.hub.selection import needed_files

    with _asking(team, field, name.hub) as settings:
        listing = look_up(name, settings, ASK_SECONDS)
        if name.file:
            needed_files(listing, "gguf", name.file)
        if listing.gated:
            check_access(listing, settings, ASK_SECONDS)
        config = read_config(listing, settings, ASK_SECONDS) if has_config else {}
    return Repository(listing.repository, listing.commit, config)


def _field_of(data: HubData, spec: ModelSpec) -> str:
    """Return the field of a plan that names a data set: of a mixture that of its row."""
    if isinstance(spec, TrainSpec) and isinstance(spec.data, MixedData):
        rows = [part.data for part in spec.data.parts]
        return f"workload.mixture.{rows.index(data)}.path"
    return "workload.data_repository"


def _ask_for_data(data: HubData, team: Team, field: str) -> str:
    """Return the commit of a data set that has files of the split; ``field`` names it."""
    from runners.hub.data_files import data_files, look_up_data
    from runners.hub.listing import check_access

    with _asking(team, field, "huggingface") as settings:
        name = RepositoryName(data.repository, data.revision)
        listing = look_up_data(name, settings, ASK_SECONDS)
        if listing.gated:
            check_access(listing, settings, ASK_SECONDS)
        data_files(listing, data.subset, data.split, settings)
    return listing.commit


@contextmanager
def _asking(team: Team, field: str, hub: str) -> Iterator[HubSettings]:
    """Give the site's settings of a hub with the team's token; what it refuses is of a field.

    Raises:
        RepositoryProblem: the hub refuses the repository.
        UnreachableError: the site does not reach the hub.
    """
    from runners.hub.errors import HubError

    try:
        settings = from_environment(os.environ, hub=hub)
    except HubSettingsError as error:  # changed since the site's start, which reads it too
        raise UnreachableError(f"{error}.") from error
    if settings.is_offline:
        raise UnreachableError("HF_HUB_OFFLINE is set for the site.")
    name = settings.token_name
    if token := secrets_open(team_id=team.pk, names=[name]).get(name):
        settings = dataclasses.replace(settings, token=token)
    try:
        yield settings
    except HubError as error:
        words = f"{error}."
        if not words.startswith(settings.endpoint):
            words = capitalised(words)
        if error.is_out_of_reach:
            raise UnreachableError(words) from error
        raise RepositoryProblem(words, field) from error
