"""Operations on models, training data, techniques and the hardware catalog; comparisons."""

import json
from itertools import islice
from typing import Annotated, Any, Literal, cast

from django.http import HttpRequest
from django.shortcuts import get_object_or_404
from ninja import File, Query, Router, Status
from ninja.files import UploadedFile
from pydantic import Field

from planner.catalog.devices import list_devices
from planner.catalog.models import (
    checkpoint_name,
    find_model,
    get_entry,
    get_model,
    list_models,
)
from planner.catalog.reading import search_names
from planner.specs.base import PlannerError, UnknownTechniqueError
from planner.techniques.registry import TECHNIQUES, get
from runners.client.replies.jobs import JobDetail
from runners.client.replies.library import (
    CellReply,
    ComparedFigure,
    ComparedSetting,
    Comparison,
    DatasetPage,
    DatasetReply,
    DevicePage,
    DeviceSummary,
    MeasurementPage,
    MeasurementReply,
    ModelDetail,
    ModelPage,
    ModelReply,
    SearchMatch,
    SearchPage,
    TechniquePage,
    TechniqueReply,
)
from runners.datasets.records import Format
from runners.jobspec.base import LONGEST_NAME, MAX_UPLOAD_BYTES, NAME_LENGTH, RevisionText
from runners.plans.document import ModelChoice
from webapp.accounts.models import Role, team_ids_of
from webapp.accounts.services import (
    check_role,
    current_membership,
    has_role,
    membership_of,
    signed_in,
    visible_or_404,
)
from webapp.api.auth import ADMIN, LAUNCH, PLAN, READ
from webapp.api.jobs import job_detail
from webapp.api.requests import Paging, Sent, ShortPaging, job_key, page_keys, page_of
from webapp.bench.ratios import stored
from webapp.bench.technique_states import row_of
from webapp.core.bodies import takes_file
from webapp.core.problems import REFUSALS, ForbiddenProblem, InvalidProblem, NotFoundProblem
from webapp.core.queries import in_order
from webapp.core.search import folded
from webapp.datasets.models import Dataset
from webapp.datasets.services import UnusableDataError, dataset_store
from webapp.jobs.artefacts import dataset_delete
from webapp.jobs.comparing import MAX_JOBS, MIN_JOBS, rows_of, settings_of, sides_of
from webapp.jobs.evaluating import evaluation_submit, tasks_of
from webapp.jobs.lookup import load_job
from webapp.jobs.measured_figures import figures_of
from webapp.jobs.measurement_decisions import may_decide, measurement_decide
from webapp.jobs.models import Job, Measurement
from webapp.jobs.publishing import model_publish
from webapp.jobs.searching import SHORTEST, search_results
from webapp.jobs.stored_files import model_delete, model_rename, model_to_change
from webapp.modelhub.models import TeamModel, kv_bytes_per_token, num_parameters
from webapp.plans.repositories import RepositoryProblem, UnreachableError, with_config
from webapp.wizard.documents import form_problem
from webapp.wizard.model_form import ModelNewForm

router = Router(tags=["library"], auth=READ)
MOST_MATCHES = 1000  # of each kind, in a search


# Models


def _team_model(model: TeamModel) -> dict[str, Any]:
    return {
        "id": model.pk,
        "name": model.name,
        "source": model.source,
        "num_parameters": model.num_parameters,
        "host": model.host.slug if model.host else "",
        "created_at": model.created_at,
    }


class ModelFilters(Paging):
    """Filters of the list of models."""

    q: Annotated[str, Query(description="Part of the name")] = ""


@router.get("/models", response={200: ModelPage, **REFUSALS}, operation_id="list_models")
def model_list(request: HttpRequest, filters: Query[ModelFilters]) -> ModelPage:
    """Return the teams' models, newest first, then the catalog's."""
    own = TeamModel.objects.visible_to(request.user).order_by("-created_at", "-pk")
    if part := filters.q.strip():
        own = own.filter(name__folded_contains=part)
    names = [entry.id for entry in list_models()]
    catalog = dict.fromkeys(names[at] for at in search_names(folded(filters.q), names))
    ids = [*own.values_list("pk", flat=True), *catalog]
    shown, more = page_of("models", ids, str, filters)
    models = TeamModel.objects.select_related("host").in_bulk(
        [each for each in shown if each not in catalog]
    )
    items = [
        ModelReply(**_team_model(models[each])) if each in models else _catalog_model(each)
        for each in shown
        if each in models or each in catalog
    ]
    return ModelPage(items=items, next_cursor=more)


def _catalog_model(model_id: str) -> ModelReply:
    return ModelReply(
        id=model_id,
        name=model_id,
        source="catalog",
        num_parameters=num_parameters(get_model(model_id)),
        host="",
        created_at=None,
    )


class NewModel(Sent):
    """A model by its ``config.json``, as Hugging Face publishes it."""

    name: Annotated[
        str, Field(max_length=NAME_LENGTH, description="Name in the team, up to 120 characters")
    ]
    config: Annotated[
        dict[str, Any] | None,
        Field(description="The content of config.json; null with a repository: read there"),
    ] = None
    repository: Annotated[
        Annotated[str, Field(min_length=3, max_length=LONGEST_NAME)] | None,
        Field(description="That has the weights, such as org/name@v1; null: planning alone"),
    ] = None


@router.post(
    "/models", auth=PLAN, response={201: ModelDetail, **REFUSALS}, operation_id="add_model"
)
def model_add(request: HttpRequest, body: NewModel) -> Status[ModelDetail]:
    """Register a model of the team by its config, or by a repository, whose weights jobs load.

    422 with the code ``hub_unreachable``: the server does not reach the hub, and needs the config.
    """
    membership = current_membership(request)
    check_role(Role(membership.role), Role.PRACTITIONER)
    if body.config is None and body.repository is None:
        words = "give the content of the model's config.json, or repository, which has one"
        errors = [{"field": "config", "message": words}]
        raise InvalidProblem("config", f"The field config is missing: {words}.", errors=errors)
    chosen = ModelChoice(source="config", config=body.config)
    if body.repository is not None:
        named = ModelChoice(source="hub", repository=body.repository, config=body.config)
        try:
            chosen = with_config(named, membership.team)
        except RepositoryProblem as problem:  # whose field is that of a plan
            raise RepositoryProblem(problem.sentence, "repository") from problem
        except UnreachableError as error:
            words = f"{error} Give its config.json too."
            raise InvalidProblem(
                "hub_unreachable",
                f"The field config is missing: {words}",
                errors=[{"field": "config", "message": words}],
            ) from error
    form = ModelNewForm({"name": body.name, "config": json.dumps(chosen.config)})
    if not form.is_valid():
        raise form_problem(form, "")
    model = TeamModel.objects.create(
        team=membership.team,
        name=form.cleaned_data["name"],
        source=chosen.source or "config",
        repository=chosen.repository or "",
        revision=chosen.revision or "",
        config=form.cleaned_data["config"],
        num_parameters=num_parameters(form.cleaned_data["shape"]),
    )
    return Status(201, _model_detail(model))


def _model_detail(model: TeamModel) -> ModelDetail:
    shape = find_model(model.config)
    return ModelDetail(
        **_team_model(model),
        shape=shape,
        kv_bytes_per_token=dict(kv_bytes_per_token(shape)) if shape else {},
        facts=model.facts,
        aliases=[],
    )


@router.get(
    "/models/{path:model_id}", response={200: ModelDetail, **REFUSALS}, operation_id="get_model"
)
def model_get(request: HttpRequest, model_id: str) -> ModelDetail:
    """Return a model of the team by its id, or one of the catalog by any of its names."""
    own = TeamModel.objects.visible_to(request.user).select_related("host")
    if model := own.filter(pk=model_id).first():
        return _model_detail(model)
    try:
        entry, shape = get_entry(model_id), get_model(model_id)
    except PlannerError as error:
        raise NotFoundProblem("unknown_model", error.message) from error
    return ModelDetail(
        id=entry.id,
        name=checkpoint_name(model_id),
        source="catalog",
        num_parameters=num_parameters(shape),
        host="",
        created_at=None,
        shape=shape,
        kv_bytes_per_token=dict(kv_bytes_per_token(shape)),
        facts={},
        aliases=list(entry.aliases),
    )


class ModelChanges(Sent):
    """What changes of a team's model."""

    name: Annotated[
        str,
        Field(
            max_length=NAME_LENGTH,
            description="1 to 120 characters; no other model of the team has it",
        ),
    ]


@router.patch(
    "/models/{path:model_id}",
    auth=PLAN,
    response={200: ModelDetail, **REFUSALS},
    operation_id="change_model",
)
def model_change(request: HttpRequest, model_id: str, body: ModelChanges) -> ModelDetail:
    """Rename a model of the team; plans and jobs keep the name that they were made with."""
    model = model_to_change(request, model_id)
    model_rename(model=model, name=body.name, by=request.user.get_username())
    return _model_detail(model)


@router.delete(
    "/models/{path:model_id}",
    auth=PLAN,
    response={204: None, **REFUSALS},
    operation_id="delete_model",
)
def model_remove(
    request: HttpRequest,
    model_id: str,
    *,
    files: Annotated[
        bool,
        Query(
            description="Whether the host also deletes what the job that made it keeps there; a "
            "folder that was there before is never deleted"
        ),
    ] = False,
) -> Status[None]:
    """Delete a model from the team's models; jobs that ran with it stay in the history."""
    model = model_to_change(request, model_id, with_files=files)
    model_delete(model=model, by=request.user.get_username(), with_files=files)
    return Status(204, None)


class EvaluationRequest(Sent):
    """Tasks of lm-evaluation-harness beside the perplexity; "" for none."""

    tasks: Annotated[
        Literal["", "named", "folder"],
        Field(description="Tasks by name, or of a folder of the host; empty: perplexity alone"),
    ] = ""
    task_names: Annotated[
        list[Annotated[str, Field(max_length=80)]],
        Field(description="Up to 64 names, such as hellaswag; empty with a folder: all of it"),
    ] = []
    task_folder: Annotated[
        str, Field(max_length=400, description="Folder with YAML files of tasks on the host")
    ] = ""
    documents: Annotated[
        Annotated[int, Field(ge=1)] | None,
        Field(description="Most documents of each task, 1 to 1,000,000; null: all"),
    ] = None


@router.post(
    "/evaluations/{model_id}",
    auth=LAUNCH,
    response={201: JobDetail, **REFUSALS},
    operation_id="evaluate_model",
)
def model_evaluate(
    request: HttpRequest, model_id: str, body: EvaluationRequest
) -> Status[JobDetail]:
    """Queue an evaluation of one of the team's models; the reply is its job."""
    model = get_object_or_404(TeamModel.objects.visible_to(request.user), pk=model_id)
    if not has_role(request.user, model.team, Role.PRACTITIONER):
        raise ForbiddenProblem(
            "role_too_low", "To evaluate a model you need the role Practitioner or higher."
        )
    posted = {
        "tasks": body.tasks,
        "task_names": " ".join(body.task_names),
        "task_folder": body.task_folder,
        "documents": str(body.documents or ""),
    }
    job = evaluation_submit(model=model, by=signed_in(request), tasks=tasks_of(posted))
    return Status(201, job_detail(load_job(request, job.pk), request))


class PublishRequest(Sent):
    """Where a model is pushed to."""

    repository: Annotated[
        str,
        Field(min_length=3, max_length=250, description="As owner/name; made if there is none"),
    ]
    revision: Annotated[RevisionText, Field(description="Branch; empty: main")] = ""
    is_private: Annotated[bool, Field(description="Of a repository that is made")] = True


@router.post(
    "/publications/{model_id}",
    auth=LAUNCH,
    response={201: JobDetail, **REFUSALS},
    operation_id="publish_model",
)
def model_push(request: HttpRequest, model_id: str, body: PublishRequest) -> Status[JobDetail]:
    """Queue the push of a model that a job made to a repository of the Hub; the reply is its job.

    Its card has base model, data, method and the measured figures. The team's secret HF_TOKEN is
    checked first: it must be able to write to the repository's owner.
    """
    model = get_object_or_404(TeamModel.objects.visible_to(request.user), pk=model_id)
    if not has_role(request.user, model.team, Role.PRACTITIONER):
        raise ForbiddenProblem(
            "role_too_low", "To push a model you need the role Practitioner or higher."
        )
    job = model_publish(
        model=model,
        repository=body.repository,
        revision=body.revision,
        is_private=body.is_private,
        by=signed_in(request),
        idempotency_key=job_key(request),
    )
    return Status(201, job_detail(load_job(request, job.pk), request))


# Training data


def _dataset(dataset: Dataset) -> DatasetReply:
    return DatasetReply(
        id=dataset.pk,
        name=dataset.name,
        sha256=dataset.sha256,
        size_bytes=dataset.size_bytes,
        num_records=dataset.num_records,
        format=cast("Format", dataset.format),
        uploaded_by=dataset.uploaded_by.get_username() if dataset.uploaded_by else "",
        created_at=dataset.created_at,
        note=dataset.left_out_sentence,
    )


@router.get("/data", response={200: DatasetPage, **REFUSALS}, operation_id="list_data")
def data_list(request: HttpRequest, paging: Query[Paging]) -> DatasetPage:
    """Return the teams' uploaded files, newest first."""
    visible = Dataset.objects.visible_to(request.user)
    listed = page_keys(visible, "created_at", team_ids_of(request.user), paging)
    rows = in_order(Dataset.objects.select_related("uploaded_by"), listed.keys)
    return DatasetPage(items=[_dataset(row) for row in rows], next_cursor=listed.next_cursor)


@router.post("/data", auth=PLAN, response={201: DatasetReply, **REFUSALS}, operation_id="add_data")
@takes_file(MAX_UPLOAD_BYTES)
def data_add(request: HttpRequest, file: File[UploadedFile]) -> Status[DatasetReply]:
    """Upload a file of training data: JSON, Parquet, CSV or text; it is checked at once."""
    membership = current_membership(request)
    check_role(Role(membership.role), Role.PRACTITIONER)
    if others := sorted({*request.POST, *request.FILES} - {"file"}):
        raise InvalidProblem(
            others[0][:40],
            f"There is no part {others[0][:40]!r} here; the one part is “file”, whose file name "
            "names the data. Leave the others out.",
        )
    try:
        dataset = dataset_store(team=membership.team, by=signed_in(request), upload=file)
    except UnusableDataError as error:
        faults = [{"field": "file", "message": text} for text in islice(error.found.errors, 20)]
        raise InvalidProblem(
            "unusable_data", f"{file.name} cannot be used: {error}", errors=faults
        ) from error
    return Status(201, _dataset(dataset))


@router.get(
    "/data/{dataset_id}", response={200: DatasetReply, **REFUSALS}, operation_id="get_data"
)
def data_get(request: HttpRequest, dataset_id: str) -> DatasetReply:
    """Return one uploaded file's facts."""
    return _dataset(visible_or_404(Dataset, request.user, pk=dataset_id))


@router.delete(
    "/data/{dataset_id}",
    auth=PLAN,
    response={204: None, **REFUSALS},
    operation_id="delete_data",
)
def data_delete(request: HttpRequest, dataset_id: str) -> Status[None]:
    """Delete an uploaded file, unless a job that has not ended uses it."""
    dataset = visible_or_404(Dataset, request.user, pk=dataset_id)
    membership = membership_of(request.user, dataset.team)
    check_role(Role(membership.role) if membership else Role.VIEWER, Role.PRACTITIONER)
    dataset_delete(dataset=dataset, by=signed_in(request))
    return Status(204, None)


# Catalogs


class DeviceFilters(ShortPaging):
    """Filters of the hardware catalog."""

    q: Annotated[str, Query(description="Part of the id, the name or the vendor")] = ""


@router.get("/devices", response={200: DevicePage, **REFUSALS}, operation_id="list_devices")
def device_list(request: HttpRequest, filters: Query[DeviceFilters]) -> DevicePage:  # noqa: ARG001 (ninja)
    """Return the devices of the hardware catalog."""
    devices = list_devices()
    names = [f"{each.id} {each.name} {each.vendor}" for each in devices]
    found = [
        DeviceSummary(
            id=each.id or "",
            name=each.name or each.id or "",
            vendor=each.vendor or "",
            kind=each.kind,
            memory_bytes=int(each.memory_bytes),
            price_usd_per_hour=each.price_usd_per_hour,
        )
        for each in (devices[at] for at in search_names(folded(filters.q), names))
    ]
    items, more = page_of("devices", found, lambda one: one.id, filters)
    return DevicePage(items=items, next_cursor=more)


def _technique(key: str) -> TechniqueReply:
    row = row_of(key, stored())
    fields = ("id", "title", "state", "headline", "job_kind", "library")
    return TechniqueReply(
        **{name: row[name] for name in fields}, phases=list(TECHNIQUES[key].phases)
    )


@router.get(
    "/techniques", response={200: TechniquePage, **REFUSALS}, operation_id="list_techniques"
)
def technique_list(request: HttpRequest, paging: Query[ShortPaging]) -> TechniquePage:  # noqa: ARG001 (ninja)
    """Return every technique that the planner knows."""
    keys, more = page_of("techniques", list(TECHNIQUES), str, paging)
    return TechniquePage(items=[_technique(key) for key in keys], next_cursor=more)


@router.get(
    "/techniques/{key}", response={200: TechniqueReply, **REFUSALS}, operation_id="get_technique"
)
def technique_get(request: HttpRequest, key: str) -> TechniqueReply:  # noqa: ARG001 (ninja)
    """Return one technique."""
    try:
        return _technique(get(key).key)
    except UnknownTechniqueError as error:
        raise NotFoundProblem("unknown_technique", error.message) from error


# Search


KINDS: dict[str, Literal["plan", "job", "host", "model", "technique"]] = {
    "plan-detail": "plan",
    "job-detail": "job",
    "host-detail": "host",
    "model-detail": "model",
    "technique-detail": "technique",
}


class SearchQuery(Paging):
    """What is searched for."""

    q: Annotated[
        str,
        Query(
            min_length=SHORTEST,
            max_length=200,
            description=f"Part of the name, {SHORTEST} to 200 characters",
        ),
    ]


@router.get("/search", response={200: SearchPage, **REFUSALS}, operation_id="search")
def search(request: HttpRequest, query: Query[SearchQuery]) -> SearchPage:
    """Return plans, jobs, hosts, models and techniques whose name contains ``q``.

    At most 1000 of each kind are found: the newest plans, jobs and models.
    """
    found = [
        SearchMatch(kind=KINDS[page], id=key, name=name)
        for _, page, rows in search_results(request.user, query.q.strip(), most=MOST_MATCHES)
        for key, name in rows
    ]
    items, more = page_of("search", found, lambda one: f"{one.kind} {one.id}", query)
    return SearchPage(items=items, next_cursor=more)


# Comparison of jobs


@router.get("/compare", response={200: Comparison, **REFUSALS}, operation_id="compare_jobs")
def compare(
    request: HttpRequest, job: Annotated[list[str], Query(description="Ids of jobs")]
) -> Comparison:
    """Compare the figures and settings of two or more jobs."""
    keys = list(dict.fromkeys(job))
    if not MIN_JOBS <= len(keys) <= MAX_JOBS:
        raise InvalidProblem(
            "job", f"{len(keys)} jobs are named; a comparison has {MIN_JOBS} to {MAX_JOBS}."
        )
    jobs = [load_job(request, key) for key in keys]
    sides, figures = sides_of(jobs), [figures_of(each) for each in jobs]
    return Comparison(
        jobs=keys,
        names=[each.name for each in jobs],
        figures=[
            ComparedFigure(
                name=row.metric,
                label=row.label,
                unit=next((cell.unit for cell in row.cells if cell.unit), ""),
                cells=[
                    CellReply(
                        predicted=cell.predicted,
                        measured=cell.measured,
                        ratio=cell.ratio,
                        change=cell.against_first,
                        state=cell.state_words,
                    )
                    for cell in row.cells
                ],
            )
            for row in rows_of(sides, figures)
        ],
        settings=[
            ComparedSetting(name=f"{each.group}: {each.name}", values=list(each.values))
            for each in settings_of(jobs, request.user)
            if each.differs
        ],
    )


# Measurements


@router.get(
    "/jobs/{job_id}/measurements",
    response={200: MeasurementPage, **REFUSALS},
    operation_id="list_measurements",
)
def measurement_list(request: HttpRequest, job_id: str, paging: Query[Paging]) -> MeasurementPage:
    """Return the measurements of a job that calibrate its host, or were excluded."""
    rows = list(_measurements(load_job(request, job_id)))
    shown, more = page_of(f"measurements {job_id}", rows, lambda row: str(row.pk), paging)
    items = [_measurement(request, row) for row in shown]
    return MeasurementPage(items=items, next_cursor=more)


def _measurements(job: Job) -> Any:  # noqa: ANN401 (a queryset)
    return Measurement.objects.filter(job=job).select_related("job__team", "host__team")


def _measurement(request: HttpRequest, row: Measurement) -> MeasurementReply:
    return MeasurementReply(
        id=row.pk,
        metric=row.metric,
        predicted=row.predicted,
        measured=row.measured,
        ratio=row.ratio,
        host=row.host.slug,
        is_counted=not row.is_excluded,
        may_decide=may_decide(request.user, row),
    )


class Decision(Sent):
    """Whether a measurement counts, and why."""

    decision: Annotated[
        Literal["excluded", "included"], Field(description="Whether it calibrates the host")
    ]
    reason: Annotated[
        str, Field(max_length=200, description="For the history, up to 200 characters")
    ]


@router.put(
    "/jobs/{job_id}/measurements/{measurement_id}",
    auth=ADMIN,
    response={200: MeasurementReply, **REFUSALS},
    operation_id="decide_measurement",
)
def measurement_put(
    request: HttpRequest, job_id: str, measurement_id: int, body: Decision
) -> MeasurementReply:
    """Exclude a measurement from the calibration of its host, or include it again."""
    row = get_object_or_404(_measurements(load_job(request, job_id)), pk=measurement_id)
    if not may_decide(request.user, row, body.decision):
        raise ForbiddenProblem(
            "role_too_low",
            f"To say what counts for {row.host.name} you need the role Operator in its team. An "
            "admin of that team can give you the role.",
        )
    by = request.user.get_username()
    measurement_decide(measurement=row, decision=body.decision, reason=body.reason, by=by)
    row.refresh_from_db()
    return _measurement(request, row)
