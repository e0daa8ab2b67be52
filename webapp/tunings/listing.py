"""Tunings as lists and pages show them: candidates with what was planned and what was measured."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from runners.plans.tuning import MORE_IS_BETTER, TuningOptions
from runners.shared.tuning import BASELINE, NORMAL_80, CandidateResult, Outcome, TuningSearch
from webapp.core.display import counted, number, percent, quantity, signed_percent
from webapp.core.figures import REGISTRY, FigureDefinition
from webapp.jobs.models import Job, JobState
from webapp.jobs.progress import elapsed_seconds
from webapp.tunings.models import TrialState, Tuning, TuningTrial
from webapp.tunings.planning import PlannedCandidate
from webapp.tunings.services import candidates_of, search_of

STATE_WORDS = {
    "untried": "Not tried",
    "measured": "Measured",
    "behind": "Behind",
    "failed": "Failed",
    "left_out": "Left out",
    "running": "Running",
    "waiting": "Waiting",
}
# States whose chip has the look of another one's.
CHIPS = {
    "untried": "incomplete",
    "measured": "succeeded",
    "behind": "stopped",
    "left_out": "expired",
}
ENDINGS = {
    "decided": "",
    "trials": "The trials were used up.",
    "seconds": "The time was used up.",
    "nothing": "",
}


LEAST_SHOWN = 0.05  # per cent
NOT_CERTAIN = (
    " That is not certain: it and the plan's own choice are measured again at least twice before "
    "a gain is claimed. A budget with room for {} decides it; until then the plan's own choice "
    "stays."
)


@dataclass(frozen=True)
class CandidateRow:
    """A candidate with what is known of it; ``trials`` in their order."""

    planned: PlannedCandidate
    result: CandidateResult
    trials: list[TuningTrial]
    is_chosen: bool = False
    own_value: float | None = None  # the measured figure of the plan's own choice

    @property
    def state(self) -> str:
        """Return what has become of it: of a trial that has not ended, that."""
        last = self.trials[-1] if self.trials else None
        if last is not None and last.state != TrialState.ENDED:
            is_queued = last.job is not None and last.job.state == JobState.QUEUED
            return str(TrialState.WAITING if is_queued else last.state)
        return self.result.state

    @property
    def state_words(self) -> str:
        """Return the state in words."""
        return STATE_WORDS[self.state]

    @property
    def chip(self) -> str:
        """Return the state whose chip is shown for it."""
        return CHIPS.get(self.state, self.state)

    @property
    def half_width(self) -> str:
        """Return half of the measured value's 80 % interval, as a share."""
        return str(percent(NORMAL_80 * self.result.error))

    @property
    def reason(self) -> str:
        """Return why it waits, failed, is behind or was left out, or ""."""
        last = self.trials[-1] if self.trials else None
        if last is not None and last.state == TrialState.WAITING:
            return last.reason
        return self.result.reason

    @property
    def value(self) -> float | None:
        """Return the measured figure in its base unit, None before it is measured."""
        return self.result.value if self.result.num_measured else None

    @property
    def against_own(self) -> str:
        """Return the change against the plan's own choice, "" for that and without both values."""
        if not self.value or not self.own_value or self.planned.number == BASELINE:
            return ""
        change = 100 * (self.value / self.own_value - 1)
        return signed_percent(change) if abs(change) >= LEAST_SHOWN else "equal"

    @property
    def note(self) -> str:
        """Return what disturbed a measurement, or ""."""
        return next((each.note for each in self.trials if each.note), "")

    @property
    def jobs(self) -> list[Job]:
        """Return the jobs of its trials that are not deleted."""
        jobs = [each.job for each in self.trials if each.job]
        return [job for job in jobs if job.deleted_at is None]


@dataclass(frozen=True)
class TuningView:
    """A tuning with its trials in order."""

    tuning: Tuning
    trials: list[TuningTrial]

    @cached_property
    def search(self) -> TuningSearch:
        """Return the decisions so far."""
        return search_of(self.tuning, self.trials)

    @property
    def outcome(self) -> Outcome:
        """Return what was found so far."""
        return self.search.outcome

    @property
    def options(self) -> TuningOptions:
        """Return what it may try and spend."""
        return TuningOptions.model_validate(self.tuning.options)

    @property
    def figure(self) -> FigureDefinition:
        """Return the figure that decides."""
        return REGISTRY[self.tuning.figure]

    @property
    def less_is_better(self) -> bool:
        """Return whether the figure is the better the lower it is."""
        return self.tuning.figure not in MORE_IS_BETTER

    @cached_property
    def rows(self) -> list[CandidateRow]:
        """Return the candidates: the chosen one, the measured ones from the best, the others.

        Of those the tried ones come first, in the order of their trials.
        """
        chosen = self.outcome.chosen
        own = self.search.results[BASELINE]
        by_candidate: dict[int, list[TuningTrial]] = {}
        for trial in self.trials:
            by_candidate.setdefault(trial.candidate, []).append(trial)
        rows = [
            CandidateRow(
                planned,
                result,
                by_candidate.get(planned.number, []),
                is_chosen=not self.tuning.is_running
                and chosen is not None
                and chosen.candidate.number == planned.number,
                own_value=own.value if own.num_measured else None,
            )
            for planned, result in zip(
                candidates_of(self.tuning), self.search.results, strict=True
            )
        ]
        last, sign = len(self.trials), 1 if self.less_is_better else -1

        def place(row: CandidateRow) -> tuple[bool, bool, float, int]:
            value = sign * row.value if row.value else math.inf
            is_missed = not row.result.is_met if row.value else True
            return (
                not row.is_chosen,
                is_missed,
                value,
                row.trials[0].number if row.trials else last,
            )

        return sorted(rows, key=place)

    @property
    def tried(self) -> list[CandidateRow]:
        """Return the candidates of which something is known."""
        return [row for row in self.rows if row.trials or row.state != "untried"]

    @property
    def untried(self) -> list[CandidateRow]:
        """Return the candidates for which the budget had no trial."""
        return [row for row in self.rows if not row.trials and row.state == "untried"]

    @property
    def figure_words(self) -> str:
        """Return the figure that decides, as within a sentence."""
        label = self.figure.label
        return label[:1].lower() + label[1:] if label[1:2].islower() else label

    @property
    def is_certain(self) -> bool:
        """Return whether the best one's gain may be claimed."""
        best, chosen = self.outcome.best, self.outcome.chosen
        if best is None or best.candidate.number == BASELINE:
            return False
        return best is chosen and not self.outcome.num_missing

    @property
    def gain_words(self) -> str:
        """Return the gain in a few words: of the best, of which less may be better."""
        best, gain = self.outcome.best, self.outcome.gain
        if best is None:
            return "nothing measured" if not self.tuning.is_running else "—"
        if gain is None:
            return "not comparable"
        if best.candidate.number == BASELINE:
            return "none so far" if self.tuning.is_running else "none"
        words = f"{_percent(gain.value)} {'less' if self.less_is_better else 'more'}"
        return words if self.is_certain else f"{words}, not certain"

    @property
    def gain_span(self) -> str:
        """Return the 90 % interval of a gain that was claimed, else ""."""
        gain = self.outcome.gain
        if gain is None or not self.is_certain:
            return ""
        return f"90 % interval {_percent(gain.low)} to {_percent(gain.high)}"

    @property
    def best_row(self) -> CandidateRow | None:
        """Return the best of those measured."""
        best = self.outcome.best
        if best is None:
            return None
        return next(row for row in self.rows if row.planned.number == best.candidate.number)

    @property
    def own_row(self) -> CandidateRow:
        """Return the plan's own choice."""
        return next(row for row in self.rows if row.planned.number == BASELINE)

    @property
    def num_ended(self) -> int:
        """Return how many trials have ended."""
        return sum(each.state == TrialState.ENDED for each in self.trials)

    @property
    def elapsed_seconds(self) -> float:
        """Return how long the trials have run together."""
        running = [each.job for each in self.trials if each.state == TrialState.RUNNING]
        return sum(each.seconds for each in self.trials) + sum(
            elapsed_seconds(job) for job in running if job
        )

    @property
    def result_words(self) -> str:
        """Return what was found, as sentences."""
        best, chosen, gain = self.outcome.best, self.outcome.chosen, self.outcome.gain
        if best is None or chosen is None:
            return self.tuning.problem or "Nothing is measured yet."
        unit, name = self.figure.unit, self.figure_words
        value = str(quantity(best.value, unit))
        words = [f"Best: {candidates_of(self.tuning)[best.candidate.number].words.lower()}"]
        if gain is None:
            found = f"{words[0]}, {name} {value}. The plan's own choice could not be measured."
        elif best.candidate.number == BASELINE:
            so_far = self.tuning.is_running
            found = "The" if so_far else "No gain: the"
            found += f" plan's own choice is the best of those measured, {name} {value}."
        else:
            change = "less" if self.less_is_better else "more"
            span = f"90 % interval {_percent(gain.low)} to {_percent(gain.high)}"
            found = f"{words[0]}, {name} {value}: {_percent(gain.value)} {change} ({span})."
            if missing := self.outcome.num_missing:
                found = f"{words[0]}, {name} {value}: {_percent(gain.value)} {change}."
                found += NOT_CERTAIN.format(counted(missing, "more trial"))
            elif chosen is not best:
                found += " That is within the noise, so the plan's own choice stays."
            elif gain.value <= 0:
                found += " It meets the latency targets, which the plan's own choice misses."
        ending = ENDINGS[self.search.ending] if self.tuning.state == "succeeded" else ""
        return " ".join(each for each in (found, ending, self.tuning.problem) if each)


def _percent(share: float) -> str:
    """Return a share with its sign, as per cent."""
    return f"{number(100 * share, 2)} %" if share < 0 else str(percent(share))


def views_of(tunings: Sequence[Tuning]) -> list[TuningView]:
    """Return tunings with their trials, read at once."""
    rows = TuningTrial.objects.filter(tuning__in=tunings).select_related("job__host")
    by_tuning: dict[str, list[TuningTrial]] = {each.pk: [] for each in tunings}
    for trial in rows.order_by("number"):
        by_tuning[trial.tuning_id].append(trial)
    return [TuningView(each, by_tuning[each.pk]) for each in tunings]


def view_of(tuning: Tuning) -> TuningView:
    """Return a tuning with its trials."""
    return views_of([tuning])[0]
