"""The pages of deployments: the list, one deployment, clients' keys, usage."""

import csv
import io
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from django.contrib import messages
from django.db.models import Case, F, QuerySet, Sum, Value, When
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.shortcuts import redirect, render
from django.utils.dateparse import parse_datetime
from django.views.decorators.debug import sensitive_variables
from django.views.decorators.http import require_GET, require_POST

from runners.plans.launch import Launch
from webapp.accounts.models import Membership, Role, team_ids_of
from webapp.accounts.services import (
    current_membership,
    current_team,
    is_at_least,
    may_change,
    membership_of,
    require_role,
    signed_in,
)
from webapp.accounts.sign_in import session_secret_keep, session_secret_of
from webapp.core.clock import now
from webapp.core.display import cell
from webapp.core.middleware import uncompressed
from webapp.core.parameters import page_number, reads_query
from webapp.core.problems import Problem
from webapp.core.queries import NewestFirst, page_by_key
from webapp.core.streaming import in_threads
from webapp.deployments.addresses import GATEWAY_PATH, gateway_url
from webapp.deployments.alarms import current_alarms
from webapp.deployments.drafts import (
    as_drafted,
    differences,
    draft_discard,
    draft_keep,
    draft_roll_out,
)
from webapp.deployments.forms import (
    ChangeForm,
    ConversationForm,
    DeployForm,
    KeyForm,
    RotationForm,
)
from webapp.deployments.keys import (
    PLAYGROUND,
    Rotation,
    key_make,
    key_revoke,
    key_rotate,
    playground_key_of,
)
from webapp.deployments.models import (
    Deployment,
    DeploymentDraft,
    KeyAlarm,
    Replica,
    ServingKey,
    Usage,
)
from webapp.deployments.permissions import (
    deployment_for,
    key_for,
    keys_of,
    own_key_for,
    usable_deployment,
    visible_deployment,
)
from webapp.deployments.replica_costs import (
    SOURCE,
    Rates,
    group_costs,
    rates_of,
    rates_of_rows,
    usd_of,
)
from webapp.deployments.services import (
    deployment_change,
    deployment_create,
    deployment_delete,
    deployment_sleep,
    deployment_wake,
)
from webapp.deployments.states import READ_WITH_REPLICAS, DeploymentState, view_of, views_of
from webapp.deployments.usage import (
    DAYS,
    MONTH,
    MOST_DAYS,
    Span,
    last_days,
    month_span,
    tokens_of,
    usage_chunks,
    usage_of,
    usage_of_teams,
)
from webapp.deployments.warm_hours import warm_hours
from webapp.live.stream import live_context, page_or_regions
from webapp.pages.acting import act, save_by_form
from webapp.plans.models import Plan

PAGE_SIZE = 50
SHOWN_REPLICAS = 10  # that have ended
SERVING_KEYS = "serving-keys"  # session key: key's id -> its text, until it is shown
SUMS = ("requests", "failed", "cut", "prompt_tokens", "cached_tokens", "completion_tokens")
PERSON = Case(  # to whom usage counts
    When(key__is_service=True, then=Value("services, no person")),
    default=F("key__owner__username"),
)
UNPROCESSABLE = 422
WAKEABLE = {DeploymentState.ASLEEP, DeploymentState.FAILING, DeploymentState.PAUSED}


def deploy(
    request: HttpRequest, plan: Plan, launch: Launch, form: DeployForm, key: str
) -> Deployment:
    """Make the deployment that the review page asks for, and wake it if it is kept awake.

    Raises:
        DraftProblem: the plan cannot be launched as an endpoint.
        Problem: a field is not valid, or the name is taken.
    """
    made = deployment_create(
        team=plan.team,
        by=signed_in(request),
        plan=plan,
        launch=launch,
        idempotency_key=key or None,
        **form.options(),
    )
    if made.is_warm(now()):
        deployment_wake(made)
    messages.success(request, f"{made.name} is deployed.")
    return made


@require_GET
@reads_query("page")
def deployment_list(request: HttpRequest) -> HttpResponse:
    """List the teams' deployments, with the address for clients."""
    teams = team_ids_of(request.user)
    rows = Deployment.objects.filter(team__in=teams, deleted_at=None)
    keys = NewestFirst(rows, "created_at", teams)
    shown = Deployment.objects.select_related("owner", "plan", "team")
    page = page_by_key(keys, shown, page_number(request), PAGE_SIZE)
    context: dict[str, Any] = {
        "page": page,
        "views": views_of(list(page.object_list)),
        "gateway_url": gateway_url(request),
    }
    if context["views"]:
        context |= live_context(request, ["jobs"])
    return page_or_regions(request, "deployments/list.html", "deployments/_list.html", context)


@require_GET
def deployment_detail(request: HttpRequest, deployment_id: str) -> HttpResponse:
    """Show a deployment: its state, its jobs, how clients reach it, and what can be changed."""
    return _detail(request, visible_deployment(request, deployment_id))


def _detail(request: HttpRequest, row: Deployment, form: ChangeForm | None = None) -> HttpResponse:
    view, held = view_of(row), membership_of(request.user, row.team)
    may = may_change(held, row)
    is_practitioner = held is not None and is_at_least(Role(held.role), Role.PRACTITIONER)
    ended = Replica.objects.filter(deployment=row, ended_at__isnull=False)
    draft = DeploymentDraft.objects.filter(deployment=row).select_related("by").first()
    context: dict[str, Any] = {
        "view": view,
        "deployment": row,
        "is_warm": row.is_warm(now()),
        "warm_until": warm_hours(row.warm_hours).end_after(now()),
        "ended": ended.select_related(*READ_WITH_REPLICAS)[:SHOWN_REPLICAS],
        "gateway_url": gateway_url(request),
        "may_change": may,
        "may_ask": is_practitioner,
        "may_wake": view.state in WAKEABLE and (may or (is_practitioner and not row.is_paused)),
        "may_sleep": may and bool(view.replicas) and not row.is_warm(now()),
        "form": form or ChangeForm(row, drafted=as_drafted(row)),
        "draft": draft,
        "differences": differences(row) if draft else [],
        "usage": _sums(Usage.objects.filter(deployment=row)),
    }
    if form is None:  # a form that is being corrected stays, and has no address to load again
        context |= live_context(request, ["jobs"])
    response = page_or_regions(
        request, "deployments/detail.html", "deployments/_regions.html", context
    )
    response.status_code = UNPROCESSABLE if form is not None else response.status_code
    return response


def _sums(rows: Any) -> dict[str, int]:  # noqa: ANN401 -- a query set of usage
    found = rows.order_by().aggregate(**{name: Sum(name) for name in SUMS})
    return {name: value or 0 for name, value in found.items()}


@require_GET
def deployment_playground(request: HttpRequest, deployment_id: str) -> HttpResponse:
    """Show a conversation with a deployment; its script asks the gateway."""
    row = usable_deployment(request, deployment_id)
    context = {
        "deployment": row,
        "form": ConversationForm(row.name, _adapters_of(row)),
        "gateway_path": GATEWAY_PATH,
        "gateway_url": gateway_url(request),
        "key_name": PLAYGROUND,
    }
    return render(request, "deployments/playground.html", context)


def _adapters_of(deployment: Deployment) -> list[str]:
    """Return the adapters that a deployment serves now."""
    serving = view_of(deployment).serving[:1]
    return [each["name"] for replica in serving for each in replica.job.spec.get("adapters", ())]


@require_POST
@sensitive_variables()
def deployment_playground_key(request: HttpRequest, deployment_id: str) -> HttpResponse:
    """Return the text of the person's own key for playgrounds."""
    row = usable_deployment(request, deployment_id)
    text = playground_key_of(team=row.team, by=signed_in(request))
    return HttpResponse(text, content_type="text/plain; charset=utf-8")


@require_POST
def deployment_wake_view(request: HttpRequest, deployment_id: str) -> HttpResponse:
    """Load a deployment's model now."""
    row = usable_deployment(request, deployment_id)
    act(request, lambda: deployment_wake(row, by=signed_in(request)))
    return redirect("deployment-detail", row.pk)


@require_POST
def deployment_sleep_view(request: HttpRequest, deployment_id: str) -> HttpResponse:
    """Stop what runs of a deployment."""
    row = deployment_for(request, deployment_id)
    words = f"{row.name} goes to sleep; the next request wakes it."
    act(request, lambda: deployment_sleep(deployment=row, by=signed_in(request)), words)
    return redirect("deployment-detail", row.pk)


@require_POST
def deployment_change_view(request: HttpRequest, deployment_id: str) -> HttpResponse:
    """Change a deployment, or keep the change as its draft; what is refused shows the form again.

    The form has the values of the draft, so that a change takes them along.
    """
    row = deployment_for(request, deployment_id)
    form = ChangeForm(row, request.POST, drafted=as_drafted(row))
    by, is_draft = signed_in(request), "draft" in request.POST

    def save() -> Deployment:
        if is_draft:
            return draft_keep(deployment=row, by=by, **form.changes()).deployment
        changed = deployment_change(deployment=row, by=by, **form.changes())
        DeploymentDraft.objects.filter(deployment=row).delete()
        return changed

    return save_by_form(
        request,
        form,
        save,
        lambda: _detail(request, row, form),
        words="{row}: the draft is kept." if is_draft else "{row} is changed.",
        page="deployment-detail",
    )


@require_POST
def draft_start_view(request: HttpRequest, deployment_id: str) -> HttpResponse:
    """Roll the draft of a change out, if it is the one that the page has shown."""
    row = deployment_for(request, deployment_id)
    seen_at = parse_datetime(request.POST.get("saved_at", ""))
    act(
        request,
        lambda: draft_roll_out(deployment=row, by=signed_in(request), seen_at=seen_at),
        f"{row.name} is changed as its draft says.",
    )
    return redirect("deployment-detail", row.pk)


@require_POST
def draft_discard_view(request: HttpRequest, deployment_id: str) -> HttpResponse:
    """Discard the draft of a change."""
    row = deployment_for(request, deployment_id)
    words = f"The draft of {row.name} is discarded."
    act(request, lambda: draft_discard(deployment=row, by=signed_in(request)), words)
    return redirect("deployment-detail", row.pk)


@require_POST
def deployment_delete_view(request: HttpRequest, deployment_id: str) -> HttpResponse:
    """Delete a deployment; its jobs stop."""
    row = deployment_for(request, deployment_id)
    words = f"{row.name} is deleted; what runs of it stops."
    act(request, lambda: deployment_delete(deployment=row, by=signed_in(request)), words)
    return redirect("deployment-list")


# Keys


@require_GET
@reads_query("new")
def key_list(request: HttpRequest) -> HttpResponse:
    """List the person's keys, an operator's team; a new one is shown once."""
    return _keys(request, KeyForm(_names(request)))


def _names(request: HttpRequest) -> list[str]:
    rows = Deployment.objects.filter(team=current_team(request), deleted_at=None)
    return list(rows.values_list("name", flat=True))


def _keys(request: HttpRequest, form: KeyForm) -> HttpResponse:
    membership = current_membership(request)
    new_id = request.GET.get("new", "")
    new_key = session_secret_of(request, SERVING_KEYS, new_id) if new_id else ""
    if new_key:
        del request.session[SERVING_KEYS]
    context = {
        "team": membership.team,
        "keys": _with_use(list(keys_of(membership))),
        "form": form,
        "rotation": RotationForm(),
        "instant": now(),
        "new_key": new_key,
        "gateway_url": gateway_url(request),
        "may_make": is_at_least(Role(membership.role), Role.PRACTITIONER),
        "is_operator": is_at_least(Role(membership.role), Role.OPERATOR),
    }
    status = UNPROCESSABLE if form.errors else 200
    response = uncompressed(render(request, "deployments/keys.html", context, status=status))
    response["Cache-Control"] = "no-store"
    return response


def _with_use(keys: list[ServingKey]) -> list[tuple[ServingKey, tuple[int, int], list[KeyAlarm]]]:
    """Return keys with their tokens of today and of this month, and the alarms of both."""
    used, alarms = tokens_of(keys), current_alarms(keys)
    return [(each, used.get(each.pk, (0, 0)), alarms.get(each.pk, [])) for each in keys]


@require_POST
@require_role(Role.PRACTITIONER)
def key_save(request: HttpRequest) -> HttpResponse:
    """Make a key; its text is shown once, on the page that follows."""
    form = KeyForm(_names(request), request.POST)
    if not form.is_valid():
        return _keys(request, form)
    try:
        key, text = key_make(
            team=current_team(request), by=signed_in(request), options=form.options()
        )
    except Problem as problem:
        form.add_error(None, problem.detail)
        return _keys(request, form)
    return _shown_once(request, key, text)


@sensitive_variables("text")
def _shown_once(request: HttpRequest, key: ServingKey, text: str) -> HttpResponse:
    """Go to the page that shows a key's text this once."""
    session_secret_keep(request, SERVING_KEYS, key.pk, text)
    response = redirect("serving-keys")
    response["Location"] += f"?new={key.pk}"
    return response


@require_POST
@sensitive_variables("text")
def key_renew(request: HttpRequest, serving_key_id: str) -> HttpResponse:
    """Give a key a new secret, which is shown once, on the page that follows."""
    key, form = own_key_for(request, serving_key_id), RotationForm(request.POST)
    if not form.is_valid():
        messages.error(request, f"Not rotated: {form.errors['overlap_hours'][0]}")
        return redirect("serving-keys")
    rotation = Rotation(overlap_hours=form.cleaned_data["overlap_hours"])
    try:
        key, text = key_rotate(key=key, by=signed_in(request), rotation=rotation)
    except Problem as problem:
        messages.error(request, problem.detail)
        return redirect("serving-keys")
    return _shown_once(request, key, text)


@require_POST
def key_remove(request: HttpRequest, serving_key_id: str) -> HttpResponse:
    """Revoke a key."""
    key = key_for(request, serving_key_id)
    if key_revoke(key=key, by=signed_in(request)):
        messages.success(request, f"{key.name} is revoked: it opens nothing any more.")
    return redirect("serving-keys")


# Usage


@require_GET
@reads_query("month")
def usage_list(request: HttpRequest) -> HttpResponse:
    """Show what the team's clients used: by deployment, key, person, team and day."""
    membership, month = current_membership(request), _month_of(request)
    span = month_span(month) if month else last_days(DAYS)
    rows = usage_of(membership, span)
    rates = rates_of(rows)
    context = {
        "team": membership.team,
        "days": DAYS,
        "month": month,
        "months": _months(),
        "total": _sums(rows),
        "cost": group_costs(rows, "key__team", rates).get(membership.team_id),
        "cost_source": SOURCE,
        "by_deployment": _grouped(rows, "deployment__name", rates),
        "by_key": _grouped(rows, "key__name", rates),
        "by_person": _grouped(rows.annotate(person=PERSON), "person", rates),
        "by_day": _grouped(rows, "day", rates),
        "by_team": _by_team(request, span),
        "is_operator": is_at_least(Role(membership.role), Role.OPERATOR),
    }
    return render(request, "deployments/usage.html", context)


def _month_of(request: HttpRequest) -> str:
    """Return the month that is asked for, such as 2026-11; "" without one that can be read."""
    month = request.GET.get("month", "")
    return month if re.fullmatch(MONTH, month) else ""


def _months() -> list[str]:
    """Return the last thirteen months, the current one first."""
    first = now().date().replace(day=1)
    found = []
    for _ in range(13):
        found.append(first.isoformat()[:7])
        first = (first - timedelta(days=1)).replace(day=1)
    return found


def _by_team(request: HttpRequest, span: Span) -> list[dict[str, Any]]:
    """Return the usage by team, for a person who is in several."""
    memberships = list(Membership.objects.filter(user=request.user.pk))
    if len(memberships) < 2:  # noqa: PLR2004 -- several
        return []
    rows = usage_of_teams(memberships, span)
    return _grouped(rows, "key__team__name", rates_of(rows))


def _grouped(rows: QuerySet[Usage], name: str, rates: Rates) -> list[dict[str, Any]]:
    found = rows.order_by().values(name).annotate(**{each: Sum(each) for each in SUMS})
    costs = group_costs(rows, name, rates)
    groups = [{"cost": costs.get(row[name]), "name": row.pop(name), **row} for row in found]
    if name == "day":
        return sorted(groups, key=lambda row: row["name"], reverse=True)
    return sorted(groups, key=lambda row: -row["prompt_tokens"] - row["completion_tokens"])


@require_GET
@reads_query("month")
def usage_file(request: HttpRequest) -> StreamingHttpResponse:
    """Stream the usage of a month or of the last year as CSV: by day (UTC), key and deployment."""
    month = _month_of(request)
    span = month_span(month) if month else last_days(MOST_DAYS)
    rows = usage_of(current_membership(request), span)
    response = StreamingHttpResponse(
        in_threads(_lines(rows), is_one_thread=True), content_type="text/csv; charset=utf-8"
    )
    response["Content-Disposition"] = 'attachment; filename="usage.csv"'
    return response


def _lines(rows: QuerySet[Usage]) -> Iterator[bytes]:
    """Yield the file in parts, as the rows are read."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(("day", "key", "owner", "deployment", *SUMS, "team", "usd"))
    yield text.getvalue().encode()
    for chunk in usage_chunks(rows):
        text.seek(0)
        text.truncate()
        rates = rates_of_rows(chunk)
        for row in chunk:
            owner = row.key.owner.get_username() if row.key.owner else ""
            names = (cell(row.key.name), cell(owner), cell(row.deployment.name))
            usd = usd_of(row, rates)
            more = (cell(row.key.team.name), "" if usd is None else f"{usd:.8g}")
            writer.writerow((row.day, *names, *(getattr(row, name) for name in SUMS), *more))
        yield text.getvalue().encode()
