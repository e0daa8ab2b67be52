"""The sole caller of the planner: drafts go in, answers are stored on the plan."""

from typing import Any

from planner import api
from planner.errors import PlannerError
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import Estimate, EstimateRequest
from planner.specs.inverse import InverseAnswer, InverseQuestion, InverseRequest
from planner.specs.plan import PlanAnswer, PlanRequest
from planner.specs.strategy import Strategy
from planner.specs.workload import GenerateWorkload, ServeWorkload, Workload
from webapp.core.clock import now
from webapp.core.wording import sentence
from webapp.plans.completeness import missing_step, refuse_incomplete
from webapp.plans.errors import DraftProblem
from webapp.plans.models import Plan, PlanState
from webapp.plans.questions import question_of
from webapp.plans.words import hardware_words, model_words, plan_title

WISHES = {"ttft_seconds", "tpot_seconds"}


def plan_compute(plan: Plan) -> PlanAnswer:
    """Ask the planner about the draft, store question and answer, and return the answer.

    Raises:
        DraftProblem: the draft cannot be asked; the stored answer is emptied.
    """
    plan.request, plan.answer, plan.computed_at = {}, {}, None
    try:
        question = question_of(plan)
        answer = _search(question.request)
    except PlannerError as error:
        raise DraftProblem(sentence(error.message), error.field or "") from error
    else:
        plan.request = question.request.model_dump(mode="json")
        plan.answer = answer.model_dump(mode="json")
        plan.computed_at = now()
        return answer
    finally:
        plan.save()


def _search(request: PlanRequest) -> PlanAnswer:
    """Return the planner's answer; where only a wish for speed is missed, the best that there is.

    The suggestions stay those that would grant the wish.
    """
    answer = api.plan(request)
    missed = {rejection.constraint for rejection in answer.rejected.values()}
    if answer.plans or not missed & WISHES or not isinstance(request.workload, ServeWorkload):
        return answer
    wishless = {"ttft_slo_seconds": None, "tpot_slo_seconds": None}
    workload = request.workload.model_copy(update=wishless)
    best = api.plan(request.model_copy(update={"workload": workload}))
    if not best.plans:
        return answer
    rejected = {**best.rejected, **answer.rejected}
    return best.model_copy(update={"suggestions": answer.suggestions, "rejected": rejected})


def stored_answer(plan: Plan) -> PlanAnswer | None:
    """Return the answer that is stored on the plan."""
    return PlanAnswer.model_validate(plan.answer) if plan.answer else None


def current_answer(plan: Plan) -> PlanAnswer:
    """Return the stored answer while the draft is still the one it was computed for.

    Raises:
        DraftProblem: the draft cannot be asked.
    """
    refuse_incomplete(plan.draft)
    if plan.answer:
        return PlanAnswer.model_validate(plan.answer)
    return plan_compute(plan)


def plan_keep(plan: Plan, name: str = "") -> Plan:
    """Mark a draft as finished: it is a plan from now on."""
    plan.name = name.strip()[:120] or plan.name or _own_name(plan)
    plan.state = PlanState.COMPUTED
    plan.save(update_fields=["name", "state", "saved_at"])
    return plan


def _own_name(plan: Plan) -> str:
    """Return a name from what, which model and where, as far as they are still there."""
    if missing_step(plan.draft):
        return "Unfinished plan"
    try:
        question = question_of(plan)
    except DraftProblem:
        return plan_title(plan.draft, model_words(plan.draft), hardware_words(plan.draft))
    model = question.team_model.name if question.team_model else ""
    host = question.host.name if question.host else ""
    words = model_words(plan.draft, model), hardware_words(plan.draft, host)
    return plan_title(plan.draft, *words)


def is_outdated(plan: Plan) -> bool:
    """Return whether the same draft would ask something else today: a host was measured anew."""
    try:
        asked = question_of(plan).request.model_dump(mode="json")
    except DraftProblem:
        return True
    return bool(plan.request) and asked != plan.request


def estimate_generation(
    request: PlanRequest, weight_dtype: str, prompt_tokens: int, output_tokens: int
) -> Estimate | None:
    """Return the cost of generating one sequence with weights of a dtype, where it has one."""
    workload = GenerateWorkload(
        batch_size=1, input_tokens=prompt_tokens, output_tokens=output_tokens
    )
    strategy = Strategy.model_validate({"weight_dtype": weight_dtype})
    return estimate_as_planned(request, workload, strategy)


def estimate_as_planned(
    request: PlanRequest, workload: Workload, strategy: Strategy
) -> Estimate | None:
    """Return the cost of a strategy for a plan's model and hardware, where it has one."""
    question = EstimateRequest(
        model=request.model,
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
    """Return the cost of one conversation of ``num_tokens`` on a cluster, where it has one."""
    answer = max(1, num_tokens // 8)
    workload = GenerateWorkload(
        batch_size=1, input_tokens=max(1, num_tokens - answer), output_tokens=answer
    )
    strategy = Strategy.model_validate({"weight_dtype": weight_dtype})
    question = EstimateRequest(model=model, cluster=cluster, workload=workload, strategy=strategy)
    try:
        return api.estimate(question)
    except PlannerError:
        return None


def limit_of(plan: Plan, question: InverseQuestion) -> InverseAnswer:
    """Return how far one thing goes for a plan's question, such as its longest context.

    Raises:
        DraftProblem: the draft cannot be asked, or the question does not suit its work.
    """
    asked = question_of(plan).request
    fields = {name: getattr(asked, name) for name in PlanRequest.model_fields}
    try:
        return api.inverse(InverseRequest(question=question, **fields))
    except PlannerError as error:
        raise DraftProblem(sentence(error.message), error.field or "") from error
