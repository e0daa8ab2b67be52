"""The serve goal as an endpoint that stays up: how many, how long, who may ask, until when."""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from runners.endpoint_spec import EngineName
from runners.engines import ENGINES
from runners.jobspec import ArtefactModel, ModelRef, NamedAdapter, ServeSpec
from webapp.accounts.models import Team
from webapp.core.problems import InvalidProblem
from webapp.jobs.models import Artefact, Attempt
from webapp.plans.drafting import Reuse, reuse_of

Draft = dict[str, Any]
ROOM_TOKENS = 4096  # a request may be so long, even where the plan's are shorter
LEAST_MINUTES, MOST_MINUTES = 0.1, 10_080.0
NAME_LENGTH = 100
MOST_ADAPTERS = 64
ADAPTER_ID_LENGTH = 6


class EndpointWish(NamedTuple):
    """What a person adds to an endpoint; the hashes are all that is kept of its keys."""

    key_hashes: tuple[str, ...] = ()
    idle_stop_seconds: float | None = None
    has_adapters: bool = False  # those that the team's jobs trained on the model
    engine: EngineName = "slipway"
    reuse: Reuse = ""
    draft: str = ""  # the id of the team's model that guesses ahead, or "lookup"


def endpoint_wish_of(posted: Mapping[str, str], key_hashes: tuple[str, ...]) -> EndpointWish:
    """Return what the launch form says of an endpoint.

    Raises:
        InvalidProblem: the minutes are no such number, there is no such engine, or it cannot be
            told what is asked.
    """
    engine = _engine_of(posted.get("engine", "slipway"))
    reuse, draft = reuse_of(posted, engine), posted.get("draft", "").strip()
    text, has_adapters = posted.get("idle", "").strip(), posted.get("adapters") == "yes"
    if not text:
        return EndpointWish(key_hashes, None, has_adapters, engine, reuse, draft)
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not LEAST_MINUTES <= minutes <= MOST_MINUTES:
        raise InvalidProblem(
            "idle",
            f"“Stop it when nobody asks for” is {text[:20]}; it can be {LEAST_MINUTES:g} to "
            f"{MOST_MINUTES:g} minutes, or empty.",
        )
    return EndpointWish(key_hashes, minutes * 60.0, has_adapters, engine, reuse, draft)


def adapters_of(team: Team, model: ModelRef) -> tuple[NamedAdapter, ...]:
    """Return the adapters that the team's jobs trained on a model, the newest first.

    A GGUF file has those of the model that it was made of: llama.cpp puts them on it.
    """
    base = _base_of(team, model)
    if base is None:
        return ()
    found = Artefact.objects.filter(
        kind="adapter", attempt__job__team=team, facts__base__attempt_id=base.attempt_id
    ).order_by("-created_at")
    fitting = [each for each in found.select_related("attempt__job") if _is_of(each, base)]
    return tuple(
        NamedAdapter(
            name=_adapter_name(each),
            adapter=ArtefactModel(attempt_id=each.attempt_id, name=each.name),
        )
        for each in fitting[:MOST_ADAPTERS]
    )


def _base_of(team: Team, model: ModelRef) -> ArtefactModel | None:
    """Return the model on which adapters were trained: of a GGUF file the one it came from."""
    if not isinstance(model, ArtefactModel):
        return None
    made = Attempt.objects.filter(pk=model.attempt_id, job__team=team, job__kind="compress")
    spec = made.values_list("job__spec", flat=True).first()
    if spec is None or spec.get("method") != "gguf":
        return model
    source = spec["model"]
    return ArtefactModel.model_validate(source) if source["source"] == "artefact" else None


def _is_of(adapter: Artefact, model: ArtefactModel) -> bool:
    return bool(adapter.facts["base"] == model.model_dump())


def _adapter_name(adapter: Artefact) -> str:
    """Return its job's name, told from others of the same name by the attempt's last letters."""
    end = adapter.attempt_id[-ADAPTER_ID_LENGTH:].lower()
    return f"{served_name(adapter.attempt.job.name)}-{end}"


def _engine_of(text: str) -> EngineName:
    for name in ENGINES:
        if name == text:
            return name
    raise InvalidProblem("engine", f"“Engine” is {text[:20]}; choose {' or '.join(ENGINES)}.")


def serve_spec(
    draft: Draft, model: ModelRef, fields: Mapping[str, Any], wish: EndpointWish
) -> ServeSpec:
    """Return the typed document that the host runs.

    ``fields``: ``name``, ``weight_dtype``, ``positions``, the model's longest sequence if it is
    known, ``max_batch_tokens``, those of a step if the plan says so, and ``engine_options``.
    Pages are reserved for what the plan has at once, at least for one request at its longest.
    llama.cpp gives each request as much as the longest may take, so that there the longest is
    the plan's.
    """
    values = draft["workload"]["serve"]
    planned = values["input_tokens"] + values["output_tokens"]
    limits: dict[str, int] = {}
    if positions := fields["positions"]:
        room = planned if wish.engine == "llamacpp" else max(planned, ROOM_TOKENS)
        longest = min(int(positions), room)
        together = values["concurrency"] * min(planned, longest)
        limits = {"max_length": longest, "kv_cache_tokens": max(longest, together)}
    if step := fields["max_batch_tokens"]:
        limits["max_batch_tokens"] = int(step)
    return ServeSpec.model_validate(
        {
            "model": model,
            "engine": wish.engine,
            "weight_dtype": fields["weight_dtype"],
            "served_name": served_name(str(fields["name"])),
            "max_concurrency": values["concurrency"],
            **limits,
            "engine_options": fields.get("engine_options"),
            "key_hashes": wish.key_hashes,
            "idle_stop_seconds": wish.idle_stop_seconds,
        }
    )


def served_name(name: str) -> str:
    """Return a model's name as clients write it."""
    found = re.sub(r"[^A-Za-z0-9._:/-]+", "-", name).strip("-._:/")[:NAME_LENGTH]
    return found.lower() or "model"
