"""The hosts, pools and models that a plan's document names: rows, and the planner's request."""

import math
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from django.db.models import Prefetch, Q

from planner.catalog.models import find_model
from planner.specs.cluster import ClusterSpec, DeviceSpec
from planner.specs.estimate import HostCalibration, PlanRequest
from planner.specs.model import ModelSpec
from planner.specs.workload import Strategy
from runners.jobspec import UploadedData
from runners.plans.document import PlanDocument
from runners.plans.refusals import DraftProblem, naming_the_field
from runners.plans.request import Surroundings, planned_shape, request_of, shared_processor
from runners.plans.training_data import uploads_named
from runners.plans.workloads import TRAINING_GOALS, TrainingData
from webapp.accounts.models import Team
from webapp.core.problems import Problem
from webapp.datasets.models import Dataset
from webapp.hosts.machines import cluster_for_host
from webapp.hosts.models import DOCUMENTS, RUNS_JOBS, Host, HostState, Pool
from webapp.modelhub.models import TeamModel, demo_config
from webapp.plans.models import Plan
from webapp.plans.teachers import teacher_config, teacher_name, team_teacher

UNREADY = frozenset({HostState.RETIRED, HostState.PENDING})  # not offered to plan for


class Question(NamedTuple):
    """The planner's request, with the rows that the document refers to."""

    document: PlanDocument
    request: PlanRequest
    host: Host | None
    team_model: TeamModel | None
    pool: Pool | None = None  # ``host`` is then representative of the pool
    teacher: TeamModel | None = None  # of a distillation, if it is the team's

    @property
    def shape(self) -> ModelSpec | None:
        """Return the shape of the model, None if the catalog does not know its family."""
        model = self.request.model
        return model if isinstance(model, ModelSpec) else find_model(model)

    @property
    def is_bound(self) -> bool:
        """Return whether the weights of model or teacher exist only on this host of a pool."""
        named = (self.team_model, self.teacher)
        return any(each is not None and each.host_id is not None for each in named)


class Shared(NamedTuple):
    """A pool that a document names, with its ready hosts."""

    pool: Pool
    hosts: list[Host]


class Names(NamedTuple):
    """The names of a document's model of the team and of its host or pool; "" without one."""

    model: str
    place: str


@dataclass(frozen=True)
class NamedRows:
    """The rows that a document names, each read once, when it is needed.

    Raises:
        DraftProblem: by each property, if the row is gone or the team may not use it.
    """

    document: PlanDocument
    plan: Plan

    @cached_property
    def host(self) -> Host | None:
        """Return the host."""
        key = self.document.hardware.host
        if key is None:
            return None
        own = Host.objects.filter(team=self.plan.team, pk=key)
        holder = self._holder
        host = holder if holder is not None and holder.pk == key else own.first()
        if host is None:
            raise DraftProblem("This host is no longer part of your team. Choose another.", "host")
        return host

    @property
    def _holder(self) -> Host | None:
        """Return the team's host that has the model's weights, which is read with the model."""
        with suppress(DraftProblem):
            holder = self.team_model.host if self.team_model else None
            return holder if holder and holder.team_id == self.plan.team_id else None
        return None

    @cached_property
    def shared(self) -> Shared | None:
        """Return the pool, unless the document names a host."""
        pool = self.document.hardware.pool
        return pool_of(self.plan.team, pool) if pool and self.host is None else None

    @cached_property
    def team_model(self) -> TeamModel | None:
        """Return the model of the team."""
        chosen = self.document.model
        if chosen.source != "team":
            return None
        own = TeamModel.objects.filter(team=self.plan.team, pk=chosen.team_model or "")
        model = own.select_related("host").first()  # mostly the host of the plan
        if model is None:
            raise DraftProblem(
                "This model is no longer part of your team. Choose another.", "model"
            )
        return model

    @property
    def model(self) -> str | dict[str, Any]:
        """Return the model as the planner takes it: a name of the catalog, or a config."""
        chosen = self.document.model
        if self.team_model is not None:
            return self.team_model.stored_config
        if chosen.source == "demo":
            return demo_config()
        if chosen.source == "catalog":
            return chosen.catalog_id
        return chosen.config or {}

    @property
    def names(self) -> Names:
        """Return the names of the model of the team and of the place, "" for what is gone."""
        names = {"model": "", "place": ""}
        with suppress(DraftProblem):
            names["model"] = self.team_model.name if self.team_model else ""
        with suppress(DraftProblem):
            names["place"] = self._place
        return Names(**names)

    @property
    def _place(self) -> str:
        if self.host is not None:
            return self.host.name if self.host.state not in UNREADY else ""
        return f"pool {pool_words(self.shared.pool, self.plan.team)}" if self.shared else ""


def question_of(plan: Plan, rows: NamedRows | None = None) -> Question:
    """Return the planner's request for a plan; ``rows``: those of its document, if read before.

    Raises:
        DraftProblem: the plan is empty, a host or model is gone, or a value is invalid.
    """
    rows = rows or NamedRows(plan.document, plan)
    document, host, shared = rows.document, rows.host, rows.shared
    team_model = rows.team_model
    places = [host] if host else shared.hosts if shared else []
    if shared is not None and team_model is not None and team_model.host_id:
        places = [each for each in places if each.pk == team_model.host_id]
    is_taught = bool(teacher_name(document))  # a draft that is only asked about has no team
    teacher = (
        team_teacher(document, plan.team, {each.pk for each in places}) if is_taught else None
    )
    if shared is not None:
        named = [each.host_id for each in (team_model, teacher) if each]
        holder = next(filter(None, named), None)  # of the model's weights, or the teacher's
        host = next((each for each in shared.hosts if each.pk == holder), shared.hosts[0])
    with naming_the_field():
        surroundings = Surroundings(
            model=rows.model,
            cluster=_cluster(plan, document, host, shared.hosts if shared else []),
            runs_jobs=host is not None and host.kind in RUNS_JOBS,
            is_pool=shared is not None,
            calibration=_calibration(host, plan),
            teacher=teacher_config(teacher),
        )
    request = request_of(document, surroundings)
    pool = shared.pool if shared else None
    return Question(document, request, host, team_model, pool, teacher)


def draft_shape(plan: Plan) -> ModelSpec | None:
    """Return the shape of the plan's model, or None if it has none."""
    try:
        return planned_shape(plan.document, NamedRows(plan.document, plan).model)
    except DraftProblem:
        return None


# The training data


def uploads_of(document: PlanDocument, team: Team) -> dict[str, UploadedData]:
    """Return the uploaded files that a training reads, by id; without those that are gone."""
    values = document.workload
    named = uploads_named(values) if isinstance(values, TrainingData) else ()
    rows = Dataset.objects.filter(team=team, pk__in=named) if named else ()
    return {
        each.pk: UploadedData.model_validate(
            {
                "dataset_id": each.pk,
                "name": each.name,
                "sha256": each.sha256,
                "size_bytes": each.size_bytes,
                "format": each.format,
            }
        )
        for each in rows
    }


# The host or the pool


def _cluster(
    plan: Plan, document: PlanDocument, host: Host | None, together: list[Host]
) -> ClusterSpec | None:
    """Return the cluster of a host, or of the hosts of a pool; None for catalog hardware."""
    if host is None:
        return None
    try:
        if together:
            return cluster_for_pool(together, document.goal, plan.team, document.pins)
        cluster = cluster_for_host(host)
        if document.goal in TRAINING_GOALS and host.has_scheduler:  # a node for each slot
            nodes = scheduler_nodes(host, document, cluster.devices_per_node)
            cluster = cluster.model_copy(update={"nodes": nodes})
        return shared_processor(cluster, document.hardware)
    except Problem as problem:
        is_passing = problem.code in {"host_unknown", "not_measured"}
        raise DraftProblem(problem.detail, "host", is_passing=is_passing) from problem


def scheduler_nodes(host: Host, document: PlanDocument, devices_per_node: int) -> int:
    """Return the nodes of a training on a scheduler's host: as many as the pinned sizes need.

    Raises:
        DraftProblem: the host may not have as many jobs there.
    """
    most, pins = int(host.facts["scheduler"]["max_jobs"]), document.pins
    sizes = (
        pins.data_parallel_size,
        pins.tensor_parallel_size,
        pins.pipeline_parallel_size,
        pins.context_parallel_size,
    )
    ranks = math.prod(size or 1 for size in sizes)
    nodes = math.ceil(ranks / (document.hardware.ranks_per_host or devices_per_node))
    if nodes > most:
        raise DraftProblem(
            f"The pinned sizes take {ranks} ranks on {nodes} nodes, and {host.name} has at most "
            f"{most} slots in {host.get_kind_display()}. Lower them, or enrol the host with "
            f"--max-jobs {nodes}.",
            "data_parallel_size",
        )
    return nodes


def _calibration(host: Host | None, plan: Plan) -> HostCalibration | None:
    """Return the host's calibration, with an anonymous name for another team's host."""
    if host is None or not host.calibration:
        return None
    calibration = HostCalibration.model_validate(host.calibration)
    if host.team_id == plan.team_id:
        return calibration
    return calibration.model_copy(update={"host": f"pool-{host.pool.slug}"})


def reachable_hosts(team: Team, *, has_documents: bool = True) -> list[Host]:
    """Return the team's hosts and those of pools shared with it, planned ones last.

    Without documents only identifying fields are loaded; others are loaded on access.
    """
    shared = Pool.objects.filter(shared_with=team).values("pk")
    hosts = Host.objects.filter(Q(team=team) | Q(pool__in=shared))
    hosts = hosts if has_documents else hosts.defer(*DOCUMENTS)
    # Pools repeat across hosts: prefetching reads each once.
    pools = Prefetch("pool", queryset=Pool.objects.select_related("team"))
    return list(hosts.order_by("kind", "created_at").prefetch_related(pools))


def pools_among(hosts: Iterable[Host], team: Team) -> list[tuple[Pool, list[Host]]]:
    """Return the pools to launch in, each with its ready hosts.

    The team's own pools need two ready hosts, as each host can also be chosen directly; for
    another team's shared pool one is enough.
    """
    together: dict[Pool, list[Host]] = defaultdict(list)
    for host in hosts:
        if host.kind == "agent" and host.state == HostState.READY:
            together[host.pool].append(host)
    return [
        (pool, ready)
        for pool, ready in together.items()
        if len(ready) > 1 or pool.team_id != team.pk
    ]


def pool_words(pool: Pool, team: Team) -> str:
    """Return a pool's name, with its team's name if that is another team."""
    return pool.name if pool.team_id == team.pk else f"{pool.name} of {pool.team.name}"


def pool_of(team: Team, pool_id: str) -> Shared:
    """Return the pool that a draft chose, with its hosts.

    Raises:
        DraftProblem: the team may not launch there any more, or too few of its hosts are ready.
    """
    for pool, hosts in pools_among(reachable_hosts(team), team):
        if pool.pk == pool_id:
            return Shared(pool, hosts)
    raise DraftProblem(
        "This pool has too few ready hosts for your team. Choose one host, or wait "
        "until another is ready.",
        "pool",
    )


def cluster_for_pool(hosts: list[Host], goal: str, team: Team, pins: Strategy) -> ClusterSpec:
    """Return the pool's hosts as nodes equal to the first; one node unless training.

    A generation uses as many nodes as its pinned parallel sizes need. For another team's host,
    devices and speed are included, but not its identity.

    Raises:
        ConflictProblem: the first host has not reported or not been measured yet.
    """
    cluster = _unnamed(cluster_for_host(hosts[0]), hosts[0].pool, team)
    if goal in TRAINING_GOALS:
        return cluster.model_copy(update={"nodes": len(hosts)})
    if goal != "generate":
        return cluster
    ranks = (pins.tensor_parallel_size or 1) * (pins.pipeline_parallel_size or 1)
    nodes = math.ceil(ranks / cluster.devices_per_node)
    return cluster.model_copy(update={"nodes": min(nodes, len(hosts))})


def _unnamed(cluster: ClusterSpec, pool: Pool, team: Team) -> ClusterSpec:
    device = cluster.device
    if pool.team_id == team.pk or not isinstance(device, DeviceSpec):
        return cluster
    if device.provenance != "measured":
        return cluster
    changes = {"id": f"pool-{pool.slug}", "source": f"measured in {pool_words(pool, team)}"}
    return cluster.model_copy(update={"device": device.model_copy(update=changes)})
