"""What the wizard's pages show: the form, the stepper, the choices, the rail."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from django.urls import reverse

from planner.catalog.devices import get_device
from planner.catalog.hf_config import model_from_config
from planner.errors import PlannerError
from planner.specs.model import ModelSpec
from runners.jobspec.data import MAX_UPLOAD_BYTES
from webapp.accounts.models import Team
from webapp.accounts.secrets import secret_names
from webapp.core.ids import new_ulid
from webapp.core.units import TIMES, bandwidth, memory, parameters, whole
from webapp.hosts.contact import Contact, contact_of
from webapp.hosts.models import Host, Pool
from webapp.hosts.virtual import planned_words
from webapp.modelhub.demo import demo_config
from webapp.modelhub.shapes import catalog_shape, num_parameters
from webapp.plans.errors import DraftProblem
from webapp.plans.launch_notes import launch_note
from webapp.plans.models import Plan
from webapp.plans.planning import current_answer, plan_compute
from webapp.plans.sharing import pool_words
from webapp.plans.verdict import problem_verdict, suggestion_chips, verdict_of
from webapp.plans.words import plan_title, short_name
from webapp.wizard.fields import StepForm, model_ids
from webapp.wizard.forms import GOAL_CHOICES, PinsForm
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

Page = dict[str, Any]


class HostChoice(NamedTuple):
    """One host as the hardware step offers it."""

    value: str
    host: Host
    cells: tuple[str, ...]
    more: str
    contact: Contact


class PoolChoice(NamedTuple):
    """Several hosts as the hardware step offers them."""

    value: str
    name: str
    more: str


def compute_quietly(plan: Plan) -> None:
    """Plan anew; what is wrong with the draft shows in the rail, not as a failure."""
    try:
        plan_compute(plan)
    except DraftProblem:
        return


def step_page(
    plan: Plan, slug: str, form: StepForm | None = None, pins: PinsForm | None = None
) -> Page:
    """Return everything that a step's page shows; forms that were sent keep their errors."""
    options = options_for(plan)
    said = summaries(plan.draft, options)
    before, after = neighbours(slug)
    return {
        "plan": plan,
        "step": next(step for step in STEPS if step.slug == slug),
        "steps": stepper(plan, slug, said),
        "before": before,
        "after": after,
        "form": form or step_form(slug, plan.draft, options),
        "template": f"wizard/{slug}.html",
        **_extras(plan, slug, options, pins),
        **rail(plan, slug),
    }


def _extras(plan: Plan, slug: str, options: Options, pins: PinsForm | None) -> Page:
    """Return what only one step needs."""
    draft = plan.draft
    if slug == "goal":
        ready = Ready(ready_hosts(plan.team))
        return {"goals": GOAL_CHOICES, "ready": ready, "launch_key": new_ulid()}
    if slug == "model":
        chosen = catalog_shape(draft["model"]["catalog_id"])
        return {
            "models": model_ids(),
            "shape_words": shape_words(chosen) if chosen else "",
            "demo_parameters": num_parameters(model_from_config(demo_config())),
        }
    if slug == "hardware":
        return {
            "pins": pins or pins_form(draft),
            "has_pins": any(draft["pins"].values())
            or bool(pins and pins.errors)
            or bool(draft["hardware"].get("memory_limit_gib")),
            "host_choices": [_host_choice(host) for host in options.hosts],
            "pool_choices": [_pool_choice(*each, plan.team) for each in options.pools],
            "has_ranks": bool(options.pools) or any(map(_has_several_gpus, options.hosts)),
        }
    if slug == "review":
        said, note = summaries(draft, options), launch_note(plan)
        return {
            "title": plan.name or plan_title(draft, said["model"], said["hardware"]),
            "team_secrets": secret_names(plan.team),
            "review": [(step, said[step.slug]) for step in STEPS[:-1]],
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
    """Return what a login node gives: its own processor says nothing of the nodes."""
    told = host.facts.get("scheduler") or {}
    options = [f"{name} {value}" for name, value in (told.get("options") or {}).items()]
    return " · ".join([f"Slurm, {told.get('max_jobs', 1)} jobs at once", *options])


def _pool_choice(pool: Pool, hosts: Sequence[Host], team: Team) -> PoolChoice:
    """Return a pool as it is offered; of another team's hosts it says what they are, not which."""
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
    """Return what the right rail shows: the verdict and the changes that would help."""
    page: Page = {"plan": plan, "slug": slug, "price": _price(plan)}
    try:
        answer = current_answer(plan)
    except DraftProblem as problem:
        return {**page, "verdict": problem_verdict(problem.sentence), "chips": []}
    url = reverse("plan-tab", args=[plan.pk, "why"])
    return {
        **page,
        "verdict": verdict_of(answer, plan.draft, url),
        "chips": suggestion_chips(answer, plan.draft),
    }


def problem_rail(plan: Plan, page: Page) -> Page:
    """Return the rail for a form that is not valid: the first error, in words."""
    forms = [form for form in (page["form"], page.get("pins")) if form is not None]
    errors = [text for form in forms for texts in form.errors.values() for text in texts]
    verdict = problem_verdict(errors[0] if errors else "Something on this page is not valid.")
    return {"plan": plan, "verdict": verdict, "chips": [], "is_unsaved": True}


def _price(plan: Plan) -> str:
    """Return where the price of catalog hardware comes from, if it has one."""
    hardware = plan.draft["hardware"]
    if hardware["choice"] != "catalog":
        return ""
    try:
        device = get_device(hardware["device"])
    except PlannerError:
        return ""
    if device.price_usd_per_hour is None:
        return ""
    return f"${device.price_usd_per_hour:g} an hour · {device.price_source or 'catalog'}"
