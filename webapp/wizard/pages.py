"""Template contexts of the wizard's pages, and detection of concurrent edits."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from django.urls import reverse

from planner.catalog.hf_config import model_from_config
from planner.specs.model import ModelSpec
from runners.jobspec.data import MAX_UPLOAD_BYTES
from webapp.accounts.models import Team
from webapp.accounts.secrets import secret_names
from webapp.core.clock import now
from webapp.core.ids import new_ulid
from webapp.core.stale import SEEN, changed_words, mark_of
from webapp.core.units import TIMES, bandwidth, memory, parameters, whole
from webapp.hosts.contact import Contact, contact_of
from webapp.hosts.device import planned_words
from webapp.hosts.models import Host, Pool
from webapp.modelhub.shapes import catalog_shape, demo_config, num_parameters
from webapp.plans.compressed_speed import planned_speed
from webapp.plans.engines import engines_named
from webapp.plans.errors import DraftProblem
from webapp.plans.launching import launch_note
from webapp.plans.models import Plan
from webapp.plans.offers import Offers, offers_of
from webapp.plans.planning import current_answer, lacks_suggestions, plan_compute, verdict_answer
from webapp.plans.sharing import pool_words
from webapp.plans.verdict import price_of, problem_verdict, verdict_of
from webapp.plans.versions import saving_of
from webapp.plans.words import plan_title, short_name
from webapp.wizard.forms import GOAL_CHOICES, PinsForm, StepForm, model_ids
from webapp.wizard.side_by_side import Ready, ready_hosts
from webapp.wizard.steps import (
    STEPS,
    Options,
    neighbours,
    options_for,
    pins_form,
    step_form,
    stepper,
    summaries,
)

# Detection of concurrent edits of one draft, by two tabs or two people.
#
# Each form carries the version mark of its step as shown, and a page id. A page may overwrite its
# own changes; it overwrites another page's changes only with the user's consent. A page numbers
# its changes, so that a request that arrives after a later one writes nothing.


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


Page = dict[str, Any]


class HostChoice(NamedTuple):
    """One host in the list of the hardware step."""

    value: str
    host: Host
    cells: tuple[str, ...]
    more: str
    contact: Contact


class PoolChoice(NamedTuple):
    """One pool of hosts in the list of the hardware step."""

    value: str
    name: str
    more: str


def compute_quietly(plan: Plan) -> None:
    """Compute the plan; errors of the draft are shown in the rail, not raised."""
    try:
        plan_compute(plan, brief=True)
    except DraftProblem:
        return


def step_page(
    plan: Plan, slug: str, form: StepForm | None = None, pins: PinsForm | None = None
) -> Page:
    """Return the context of a step's page; submitted forms keep their errors."""
    options = options_for(plan, slug)
    summary = summaries(plan.draft, options)
    before, after = neighbours(slug)
    form = form or step_form(slug, plan.draft, options)
    return {
        "plan": plan,
        "step": next(step for step in STEPS if step.slug == slug),
        "steps": stepper(plan, slug, summary),
        "before": before,
        "after": after,
        "form": form,
        "template": f"wizard/{slug}.html",
        **form_marks(plan, slug),
        **_extras(plan, slug, options, form, pins),
        **rail(plan, slug),
    }


def _extras(
    plan: Plan, slug: str, options: Options, form: StepForm | None, pins: PinsForm | None
) -> Page:
    """Return the context that only this step needs."""
    draft = plan.draft
    if slug == "goal":
        ready = Ready(ready_hosts(plan.team))
        return {"goals": GOAL_CHOICES, "ready": ready, "launch_key": new_ulid()}
    if slug == "model":
        named = form["catalog_id"].value() if form else ""
        return {
            "models": model_ids(),
            "shape_words": _catalog_words(named or ""),
            "demo_parameters": num_parameters(model_from_config(demo_config())),
        }
    if slug == "hardware":
        return {
            "pins": pins or pins_form(draft),
            "has_pins": any(draft["pins"].values())
            or bool(pins and pins.errors)
            or bool(draft["hardware"].get("memory_limit_gib"))
            or bool(draft["hardware"].get("engine")),
            "host_choices": [_host_choice(host) for host in options.hosts],
            "pool_choices": [_pool_choice(*each, plan.team) for each in options.pools],
            "has_ranks": bool(options.pools) or any(map(_has_several_gpus, options.hosts)),
        }
    if slug == "review":
        summary, note = summaries(draft, options), launch_note(plan)
        filled = draft.get("launch") or {}
        named = plan.name if plan.is_named is not False else ""
        return {
            "title": named or plan_title(draft, summary["model"], summary["hardware"]),
            "filled": filled,
            "saving": saving_of(plan),
            "team_secrets": secret_names(plan.team),
            "review": [(step, summary[step.slug]) for step in STEPS[:-1]],
            "note": note,
            "is_endpoint_first": "can_serve" in note and draft.get("preset") != "benchmark",
            "launch_key": new_ulid(),
        }
    return {
        "goal": draft["goal"]["goal"],
        "limit_bytes": MAX_UPLOAD_BYTES,
        "upload_url": reverse("plan-upload", args=[plan.pk]),
    }


def shape_words(shape: ModelSpec) -> str:
    """Return a model's shape in one line."""
    heads = f"{shape.num_attention_heads} heads, {shape.num_key_value_heads} for keys and values"
    context = f"{whole(shape.max_position_embeddings)} tokens of context"
    layers = f"{shape.num_hidden_layers} layers"
    return f"{parameters(num_parameters(shape))} parameters · {layers} · {heads} · {context}"


def _host_choice(host: Host) -> HostChoice:
    if host.kind == "virtual":
        return HostChoice(f"host:{host.pk}", host, (), planned_words(host), Contact.UNKNOWN)
    if host.kind == "slurm":
        return HostChoice(f"host:{host.pk}", host, (), _slurm_words(host), contact_of(host))
    gpus = host.facts.get("gpus") or []
    cells = tuple(f"{round(gpu['memory_bytes'] / 1024**3)}" for gpu in gpus)
    words = [f"{len(gpus)} {TIMES} {short_name(gpus[0]['name'])}" if gpus else "CPU only"]
    if host.facts:
        words += [f"{host.facts['cpu_count']} cores", str(memory(host.facts["memory_bytes"]))]
    for device in (host.microbench.get("devices") or [])[:1]:
        words.append(f"{bandwidth(device['memory_bandwidth_bytes_per_second'])} measured")
    return HostChoice(f"host:{host.pk}", host, cells, " · ".join(words), contact_of(host))


def _has_several_gpus(host: Host) -> bool:
    return len(host.facts.get("gpus") or []) > 1


def _slurm_words(host: Host) -> str:
    """Return the Slurm options of a login node; its own processor is not the job's."""
    scheduler = host.facts.get("scheduler") or {}
    options = [f"{name} {value}" for name, value in (scheduler.get("options") or {}).items()]
    return " · ".join([f"Slurm, {scheduler.get('max_jobs', 1)} jobs at once", *options])


def _pool_choice(pool: Pool, hosts: Sequence[Host], team: Team) -> PoolChoice:
    """Return a pool's entry; for another team's pool, hosts are counted by kind, not named."""
    if pool.team_id == team.pk:
        names = ", ".join(host.name for host in hosts)
        more = f"{len(hosts)} hosts together: {names}"
    else:
        kinds = Counter(_devices_words(host) for host in hosts)
        counted = [(f"{n} hosts" if n > 1 else "1 host", words) for words, n in kinds.items()]
        more = ", ".join(f"{count} with {words}" for count, words in counted)
    return PoolChoice(f"pool:{pool.pk}", pool_words(pool, team), more)


def _devices_words(host: Host) -> str:
    gpus = host.facts.get("gpus") or []
    if gpus:
        return f"{len(gpus)} {TIMES} {short_name(gpus[0]['name'])}"
    cores = host.facts.get("cpu_count")
    return f"{cores} cores, no GPU" if cores else "no GPU"


def rail(plan: Plan, slug: str = "") -> Page:
    """Return the context of the right rail: the verdict and the suggested changes.

    Suggestions take longer to compute than a verdict: if they are missing, the rail loads them
    in a second request.
    """
    page: Page = {"plan": plan, "slug": slug}
    try:
        answer = verdict_answer(plan)
    except DraftProblem as problem:
        verdict = problem_verdict(problem.sentence, is_refused=problem.is_refused)
        engines = engines_named(problem.sentence, plan.draft) if problem.is_refused else {}
        return {**page, "verdict": verdict, "offers": [], "engines": engines}
    url = reverse("plan-tab", args=[plan.pk, "why"])
    return {
        **page,
        "verdict": verdict_of(answer, plan.draft, url, speed=planned_speed(plan)),
        "offers": offers_of(answer, plan.draft),
        "has_offers_to_come": lacks_suggestions(plan),
        "price": price_of(answer.plans[0] if answer.plans else None),
    }


def offers_found(plan: Plan) -> list[Offers]:
    """Return the suggested changes; compute and store the full answer if needed."""
    try:
        return offers_of(current_answer(plan), plan.draft)
    except DraftProblem:
        return []


def live(plan: Plan, slug: str) -> Page:
    """Return the context of a partial update after a save: rail, stepper and model card."""
    summary = summaries(plan.draft, options_for(plan))
    page = {**rail(plan, slug), "steps": stepper(plan, slug, summary)}
    if slug == "model":
        page["shape_words"] = _catalog_words(plan.draft["model"]["catalog_id"])
    return page


def _catalog_words(model: str) -> str:
    shape = catalog_shape(model)
    return shape_words(shape) if shape else ""


def problem_rail(plan: Plan, page: Page) -> Page:
    """Return the context of the rail for an invalid form: its first error."""
    forms = [form for form in (page["form"], page.get("pins")) if form is not None]
    errors = [text for form in forms for texts in form.errors.values() for text in texts]
    stale = page.get("stale", "")
    sentence = stale or (errors[0] if errors else "Something on this page is not valid.")
    rail = {"plan": plan, "verdict": problem_verdict(sentence), "offers": [], "is_unsaved": True}
    return rail | {"stale": stale, "slug": page["step"].slug}
