"""A whole training run: length schedules and time budgets."""

from dataclasses import replace

from planner.cost.equation import Ledger, Unrecorded
from planner.specs.workload import TrainWorkload
from planner.workload.heterogeneous import train_unlike
from planner.workload.outcome import Outcome
from planner.workload.setting import Setting
from planner.workload.train import train


def train_run(setting: Setting, workload: TrainWorkload, ledger: Ledger) -> Outcome:
    """Return the cost of a training run: its longest step and the scheduled run."""
    outcome = _step(setting, workload, ledger)
    if not workload.length_schedule and not workload.time_budget_seconds:
        return outcome
    rate = _mean_rate(setting, workload, outcome)
    budget = workload.time_budget_seconds
    figures: dict[str, float] = {}
    if budget:
        figures = {"duration_seconds": budget, "trained_tokens": rate * budget}
    elif workload.tokens:
        figures = {"duration_seconds": workload.tokens / rate}
    return replace(outcome, performance=outcome.performance.model_copy(update=figures))


def _step(setting: Setting, workload: TrainWorkload, ledger: Ledger) -> Outcome:
    """Return the cost of one step; heterogeneous devices get an uneven layer split."""
    is_mixed = bool(setting.cluster.other_nodes)
    return (train_unlike if is_mixed else train)(setting, workload, ledger)


def _mean_rate(setting: Setting, workload: TrainWorkload, outcome: Outcome) -> float:
    """Return the tokens per second over the whole schedule."""
    longest = _rate_of(outcome)
    if not workload.length_schedule:
        return longest
    per_token = sum(
        share / _rate_at(setting, workload, length) for length, share in workload.length_schedule
    )
    return 1.0 / per_token


def _rate_at(setting: Setting, workload: TrainWorkload, length: int) -> float:
    """Return the tokens per second at a shorter length with equal tokens per step."""
    ratio = workload.sequence_length / length
    shorter = workload.model_copy(update={"sequence_length": length})
    rows = replace(setting.layout, micro_batch=setting.layout.micro_batch * ratio)  # type: ignore[arg-type]  # a mean number of rows
    outcome = _step(replace(setting, workload=shorter, layout=rows), shorter, Unrecorded())
    return _rate_of(outcome) * ratio


def _rate_of(outcome: Outcome) -> float:
    rate = outcome.performance.tokens_per_second
    return 0.0 if rate is None else rate
