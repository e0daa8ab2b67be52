"""Run the planner for plans and store its answers."""

import contextlib
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from django.contrib.auth.models import User
from pydantic import ValidationError

from planner import api
from planner.catalog.engines import AUTO
from planner.catalog.models import find_model
from planner.specs.base import PlannerError
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import (
    Estimate,
    EstimateRequest,
    InverseAnswer,
    InverseQuestion,
    InverseRequest,
    PlanAnswer,
    PlanRequest,
)
from planner.specs.model import ModelSpec
from planner.specs.workload import GenerateWorkload, Strategy, Workload
from runners.plans.document import read_stored
from runners.plans.refusals import DraftProblem
from runners.plans.request import recomputations_of
from webapp.core.clock import now
from webapp.core.display import sentence
from webapp.plans.models import Plan
from webapp.plans.places import question_of
from webapp.plans.saving import ANSWERED, answer_write, draft_begun_from, draft_write, version_save

# Locks of searches that run; a lock is dropped with its last user.
_LOCKS: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
_LOCKS_GUARD = threading.Lock()


class Answered(NamedTuple):
    """A question and the planner's answer to it."""

    request: PlanRequest
    answer: PlanAnswer
    is_brief: bool

    @property
    def columns(self) -> dict[str, Any]:
        """Return the values of a plan's columns ``ANSWERED``."""
        return {
            "request": self.request.model_dump(mode="json"),
            "answer": self.answer.model_dump(mode="json"),
            "is_brief": self.is_brief,
            "computed_at": now(),
        }


UNANSWERED: Mapping[str, Any] = {
    "request": {},
    "answer": {},
    "is_brief": False,
    "computed_at": None,
}


def compute(plan: Plan, *, brief: bool = False, request: PlanRequest | None = None) -> Answered:
    """Run the planner and return the question with its answer; the plan is not changed.

    With ``brief`` only the best plan is computed, which is several times faster. ``request`` is
    answered in place of the one that the document asks today.

    Raises:
        DraftProblem: the document cannot be planned.
    """
    try:
        request = request or question_of(plan).request
        search = api.best_plan if brief else _search
        answer = search(request)
        for each in recomputations_of(plan.document) if _recomputes_in_part(answer) else ():
            pins = request.pins.model_copy(update={"activation_recomputation": each})
            pinned = request.model_copy(update={"pins": pins})
            if (narrower := search(pinned)).plans:
                return Answered(pinned, narrower, brief)
    except PlannerError as error:
        raise DraftProblem(sentence(error.message), error.field or "", is_refused=True) from error
    return Answered(request, answer, brief)


def _set_columns(plan: Plan, columns: Mapping[str, Any]) -> None:
    for name, value in columns.items():
        setattr(plan, name, value)


def plan_compute(plan: Plan, *, brief: bool = False) -> PlanAnswer:
    """Plan a draft, store draft, question and answer, and return the answer.

    For a saved plan only a missing answer is stored.

    Raises:
        DraftProblem: the draft cannot be planned; the stored answer is cleared.
        PlanChangedError: somebody wrote or saved the draft since it was read.
    """
    store = draft_write if plan.is_draft else answer_write
    try:
        answered = compute(plan, brief=brief)
    except DraftProblem:
        _set_columns(plan, {**UNANSWERED, "is_brief": brief})
        store(plan)
        raise
    _set_columns(plan, answered.columns)
    store(plan)
    return answered.answer


def plan_answer(plan: Plan, *, brief: bool = False) -> PlanAnswer:
    """Plan a draft that is not stored, and return its answer; ``brief``: the best plan alone.

    Raises:
        DraftProblem: the draft cannot be planned.
    """
    answered = compute(plan, brief=brief)
    _set_columns(plan, answered.columns)
    return answered.answer


def _recomputes_in_part(answer: PlanAnswer) -> bool:
    """Return whether the best plan recomputes the activations of attention only."""
    return bool(answer.plans) and answer.plans[0].strategy.activation_recomputation == "selective"


def plan_again(plan: Plan, by: User) -> Plan:
    """Plan with current measurements: a draft in place, a saved plan as a new version.

    Raises:
        DraftProblem: the plan cannot be computed any more; a saved plan is unchanged.
    """
    if plan.is_draft:
        plan_compute(plan)
        return plan
    draft = draft_begun_from(plan, by, **compute(plan).columns)
    saved = version_save(draft, by=by.get_username())
    if saved.pk != draft.pk:  # question and answer are unchanged
        draft.delete()
    return saved


def _search(request: PlanRequest) -> PlanAnswer:
    """Return the planner's answer; if only a target is missed, the best plan that fits.

    The suggestions remain those that would meet the target.
    """
    answer = api.plan(request)
    bare = request.without_targets()
    if (
        answer.plans
        or bare == request
        or any(suggestion.purpose == "fit" for suggestion in answer.suggestions)
    ):
        return answer
    best = api.plan(bare)
    if not best.plans:
        return answer
    rejected = {**best.rejected, **answer.rejected}
    return best.model_copy(update={"suggestions": answer.suggestions, "rejected": rejected})


def stored_answer(plan: Plan) -> PlanAnswer | None:
    """Return the stored answer of the plan."""
    return PlanAnswer.model_validate(plan.answer) if plan.answer else None


def _stored_request(plan: Plan) -> PlanRequest | None:
    """Return what a version asked when it was saved, None if the planner reads that no more."""
    try:
        return PlanRequest.model_validate(plan.request)
    except ValidationError:
        return None


def current_answer(plan: Plan) -> PlanAnswer:
    """Return the full answer of a plan, from storage if possible.

    Raises:
        DraftProblem: the draft cannot be planned.
    """
    read_stored(plan.draft)  # an answer to a document that is not valid today is not shown
    if plan.answer and not plan.is_brief:
        return PlanAnswer.model_validate(plan.answer)
    with _search_lock(str(plan.pk)):
        if stored := _stored_meanwhile(plan):
            return stored
        # A plan that is refused keeps its brief answer, and a version what it asked when saved.
        is_asked = bool(plan.request) and not plan.is_draft
        asked = _stored_request(plan) if is_asked else None
        answered = compute(plan, request=asked)
        _set_columns(plan, answered.columns)
        answer_write(plan)
    return answered.answer


def _search_lock(key: str) -> threading.Lock:
    """Return the lock of a plan's full search: two requests for it search once."""
    with _LOCKS_GUARD:
        return _LOCKS.setdefault(key, threading.Lock())


def _stored_meanwhile(plan: Plan) -> PlanAnswer | None:
    """Return the full answer that another request has stored since the plan was read."""
    stored = Plan.objects.filter(pk=plan.pk, revision=plan.revision, is_brief=False)
    row = stored.exclude(answer={}).values(*ANSWERED).first()
    if row is None:
        return None
    _set_columns(plan, row)
    return PlanAnswer.model_validate(plan.answer)


def verdict_answer(plan: Plan) -> PlanAnswer:
    """Return the stored answer, full or brief, else compute a brief one, for a verdict.

    Raises:
        DraftProblem: the draft cannot be planned.
    """
    read_stored(plan.draft)
    if plan.answer:
        return PlanAnswer.model_validate(plan.answer)
    answered = compute(plan, brief=True)
    _set_columns(plan, answered.columns)
    answer_write(plan)
    return answered.answer


def lacks_suggestions(plan: Plan) -> bool:
    """Return whether a brief answer found no plan, or none within the targets.

    A full answer then includes suggestions.
    """
    answer = plan.answer
    return plan.is_brief and (not answer.get("plans") or answer.get("request") != plan.request)


def lacks_only_suggestions(plan: Plan) -> bool:
    """Return whether a brief answer found no plan: a full one adds suggestions alone."""
    return plan.is_brief and bool(plan.answer) and not plan.answer.get("plans")


def plan_keep(plan: Plan, name: str = "", *, by: str = "", as_new: bool = False) -> Plan:
    """Save a draft as a version and return it; ``name`` is a person's, "" keeps the current name.

    The version gets its full answer if the draft can be planned; where nothing fits, its page
    loads the suggestions that are missing. For an unchanged draft the original plan is returned,
    and for a saved plan the plan itself.

    Raises:
        PlanChangedError: somebody wrote the draft since it was read.
    """
    if plan.is_brief and not lacks_only_suggestions(plan):
        with contextlib.suppress(DraftProblem):
            current_answer(plan)
    return version_save(plan, name=name.strip(), by=by, as_new=as_new)


def is_outdated(plan: Plan) -> bool:
    """Return whether the draft's question has changed, for example by new measurements."""
    try:
        current = question_of(plan).request.model_dump(mode="json")
    except DraftProblem:
        return True
    return bool(plan.request) and current != plan.request


def estimate_generation(
    request: PlanRequest, weight_dtype: str, prompt_tokens: int, output_tokens: int
) -> Estimate | None:
    """Return the estimate of generating one sequence with weights of a dtype, or None."""
    workload = GenerateWorkload(
        batch_size=1, input_tokens=prompt_tokens, output_tokens=output_tokens
    )
    strategy = Strategy.model_validate({"weight_dtype": weight_dtype})
    return estimate_as_planned(request, workload, strategy)


def estimate_as_planned(
    request: PlanRequest, workload: Workload, strategy: Strategy
) -> Estimate | None:
    """Return the estimate of a strategy for a plan's model and hardware, or None."""
    question = EstimateRequest(
        model=request.named_model,
        cluster=request.cluster,
        workload=workload,
        strategy=strategy,
        engine=request.engine,
        host_calibration=request.host_calibration,
    )
    try:
        return api.estimate(question)
    except PlannerError:
        return None


def fits_on(
    model: str | dict[str, Any], cluster: ClusterSpec, weight_dtype: str, num_tokens: int
) -> Estimate | None:
    """Return the estimate of one conversation of ``num_tokens`` on a cluster, or None.

    The model is split over as many devices of a node as divide its heads.
    """
    answer = max(1, num_tokens // 8)
    workload = GenerateWorkload(
        batch_size=1, input_tokens=max(1, num_tokens - answer), output_tokens=answer
    )
    split = _most_ranks(find_model(model), cluster.devices_per_node)
    strategy = Strategy.model_validate(
        {"weight_dtype": weight_dtype, "tensor_parallel_size": split}
    )
    question = EstimateRequest(model=model, cluster=cluster, workload=workload, strategy=strategy)
    try:
        return api.estimate(question)
    except PlannerError:
        return None


def _most_ranks(model: ModelSpec | None, num_devices: int) -> int:
    """Return the largest tensor parallel size of a model on ``num_devices``; 1 if unknown."""
    if model is None:
        return 1
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    sizes = (size for size in range(1, min(num_devices, heads) + 1) if heads % size == 0)
    return max(s for s in sizes if max(kv_heads, s) % min(kv_heads, s) == 0)


def limit_of(plan: Plan, question: InverseQuestion) -> InverseAnswer:
    """Return the limit of one quantity for a plan, such as its longest context, on its engine.

    Raises:
        DraftProblem: the draft cannot be planned, or the question does not suit its goal.
    """
    request = question_of(plan).request
    if request.engine == AUTO and (planned := plan.answer.get("plans")):
        request = request.model_copy(update={"engine": planned[0]["engine"]})
    fields = {name: getattr(request, name) for name in PlanRequest.model_fields}
    try:
        return api.inverse(InverseRequest(question=question, **fields))
    except PlannerError as error:
        raise DraftProblem(sentence(error.message), error.field or "") from error
