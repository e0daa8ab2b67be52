"""A tuning: which candidate is measured next, which are left out and why, and what was found.

It reads no clock and starts no job: jobs measure the candidates, and the planner predicts them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

BASELINE = 0  # number of the plan's own choice
REPEATS = 2  # trials that are kept for measuring the best again
MOST_EACH = 4  # measurements of one candidate
# Of one measurement, as a share of its value, before any was repeated; as good as one repetition
USUAL_SPREAD = 0.02
NORMAL_80 = 1.282  # half of an 80 % interval, in standard deviations
MOST_LOST = 2  # trials of a candidate that its host or the site ended
GIB = 2**30

# ``memory``: it ran out of memory. ``failed``: it ended by its own fault. ``withdrawn``: a person
# stopped it. ``lost``: the host or the site ended it.
TrialEnding = Literal["measured", "memory", "failed", "withdrawn", "lost"]
CandidateState = Literal["untried", "measured", "behind", "failed", "left_out"]
# Why nothing more is measured: it is decided, the budget is spent, or nothing is left to try.
TuningEnding = Literal["decided", "trials", "seconds", "nothing"]


@dataclass(frozen=True)
class Candidate:
    """One way to run a plan; ``settings`` is what differs from the plan's own choice, by name.

    ``predicted``: the figure that decides, as planned, in its unit. ``peak_bytes``: the planned
    peak memory of the fullest device.
    """

    number: int
    settings: Mapping[str, object]
    predicted: float
    peak_bytes: int


@dataclass(frozen=True)
class Observation:
    """What one trial of a candidate has shown, in the order of the trials.

    ``value``: the figure that decides, in its unit. ``spread``: the standard error of the value
    within the trial, as a share of it. ``seconds``: how long the trial ran.
    """

    candidate: int
    ending: TrialEnding
    seconds: float
    value: float = 0.0
    spread: float = 0.0
    is_met: bool = True  # the plan's latency targets
    reason: str = ""


@dataclass(frozen=True)
class CandidateResult:
    """What is known of a candidate; ``value`` is the geometric mean of its measurements.

    ``error``: the standard error of the value, as a share of it.
    """

    candidate: Candidate
    state: CandidateState
    reason: str = ""
    num_measured: int = 0
    value: float = 0.0
    error: float = 0.0
    is_met: bool = True


@dataclass(frozen=True)
class Gain:
    """The gain of a candidate over the plan's own choice, as a share of that, with 80 % interval.

    Of a figure of which less is better, it is the share that is saved.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Outcome:
    """What a tuning has found: ``chosen`` is the plan's own choice without a certain gain.

    None: nothing was measured. ``gain``: of the best, None if the plan's own choice was not
    measured.
    """

    best: CandidateResult | None
    chosen: CandidateResult | None
    gain: Gain | None


@dataclass(frozen=True)
class TuningSearch:
    """The candidates of a tuning, its budget and what was observed so far.

    ``candidates``: the plan's own choice comes first; of equal ones the earlier is tried first.
    ``max_seconds`` limits the sum of the trials' seconds; no trial begins that is expected to end
    later, but the first.
    """

    candidates: Sequence[Candidate]
    observations: Sequence[Observation]
    max_trials: int
    max_seconds: float
    less_is_better: bool = False
    _of: Mapping[int, list[Observation]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        found: dict[int, list[Observation]] = {each.number: [] for each in self.candidates}
        for each in self.observations:
            found[each.candidate].append(each)
        object.__setattr__(self, "_of", found)

    # The next trial

    def next_candidate(self) -> Candidate | None:
        """Return the candidate to measure next; None once the tuning has ended."""
        return None if self._spent() else self._wanted()

    @property
    def ending(self) -> TuningEnding:
        """Return why there is no next trial."""
        if self._wanted() is None:
            return "decided" if self.outcome.best else "nothing"
        return self._spent() or "decided"

    @property
    def seconds_left(self) -> float:
        """Return the seconds that the trials may still take."""
        return max(0.0, self.max_seconds - sum(each.seconds for each in self.observations))

    @property
    def trial_seconds(self) -> float:
        """Return how long a trial is expected to take, by those before it; 0 before the first."""
        measured = [each.seconds for each in self.observations if each.ending == "measured"]
        return sum(measured) / len(measured) if measured else 0.0

    def _spent(self) -> Literal["trials", "seconds", ""]:
        if len(self.observations) >= self.max_trials:
            return "trials"
        if self.observations and self.trial_seconds >= self.seconds_left:
            return "seconds"
        return ""

    def _wanted(self) -> Candidate | None:
        """Return the candidate that a larger budget would measure next.

        First each is measured once, while enough is left to measure the best again. Then the two
        best are measured in turn, and the plan's own choice, until they differ by more than the
        noise. What is left of the budget then goes to those that were not tried.
        """
        untried = self._most_promising()
        if untried is not None and self._has_room():
            return untried
        rivals = self._rivals()
        if rivals:
            return min(rivals, key=lambda each: each.num_measured).candidate
        return untried

    def _most_promising(self) -> Candidate | None:
        """Return the candidate to try next, None if all were tried or are left out.

        The plan's own choice comes first, then each setting by itself, once: the planner may be
        wrong about any. Then the expectation decides: what is predicted, with the errors of the
        prediction that the settings by themselves have shown.
        """
        untried = [each.candidate for each in self.results if each.state == "untried"]
        if not untried or untried[0].number == BASELINE:
            return untried[0] if untried else None
        tried = {name for each in self._tried_alone for name in each.settings}
        alone = (each for each in untried if len(each.settings) == 1)
        for each in alone:
            if not each.settings.keys() & tried:
                return each
        return max(untried, key=self._expected)

    @property
    def _tried_alone(self) -> list[Candidate]:
        tried = [each.candidate for each in self.results if self._of[each.candidate.number]]
        return [each for each in tried if len(each.settings) == 1]

    def _expected(self, candidate: Candidate) -> float:
        """Return the expected score of a candidate: the errors of its settings are added."""
        errors = (self._errors.get(each, 0.0) for each in candidate.settings.items())
        return self._sign * math.log(candidate.predicted) + sum(errors)

    @cached_property
    def _errors(self) -> dict[tuple[str, object], float]:
        """Return how much better than predicted each setting by itself was, as a logarithm.

        It is compared with the plan's own choice, so that what the planner misjudges on this host
        in every candidate does not count.
        """
        known = {each.candidate.number: each for each in self.results if each.num_measured}
        if BASELINE not in known:
            return {}

        def error(result: CandidateResult) -> float:
            return self._sign * math.log(result.value / result.candidate.predicted)

        return {
            setting: error(known[each.number]) - error(known[BASELINE])
            for each in self._tried_alone
            if each.number in known
            for setting in each.settings.items()
        }

    @property
    def _sign(self) -> float:
        return -1.0 if self.less_is_better else 1.0

    def _has_room(self) -> bool:
        """Return whether another first measurement leaves enough to measure the best again."""
        kept = min(REPEATS, max(0, self.max_trials - REPEATS))
        has_trials = len(self.observations) + kept < self.max_trials
        return has_trials and (1 + kept) * self.trial_seconds < self.seconds_left

    def _rivals(self) -> list[CandidateResult]:
        """Return the candidates that are worth another measurement, the best first."""
        close = self._ranked("measured")  # without those that are behind
        if not close:
            return []
        best = close[0]
        own = [each for each in close[2:] if each.candidate.number == BASELINE]
        rivals = [*close[:2], *own]
        if len(rivals) == 1 and best.num_measured >= REPEATS:
            return []  # all others are behind
        return [each for each in rivals if each.num_measured < MOST_EACH]

    # What is known of each candidate

    @cached_property
    def results(self) -> list[CandidateResult]:
        """Return what is known of each candidate, in the order of the candidates."""
        found = [self._known(each) for each in self.candidates]
        measured = [each for each in found if each.state == "measured"]
        if not measured:
            return found
        best = max(measured, key=self._rank)
        return [self._behind(each, best) if each.state == "measured" else each for each in found]

    @cached_property
    def outcome(self) -> Outcome:
        """Return what was found so far."""
        ranked = self._ranked("measured", "behind")
        if not ranked:
            return Outcome(None, None, None)
        best = ranked[0]
        own = next((each for each in ranked if each.candidate.number == BASELINE), None)
        if own is None or own is best:
            return Outcome(best, best, None if own is None else Gain(0.0, 0.0, 0.0))
        gain = self._gain(best, own)
        is_certain = gain.low > 0.0 or (best.is_met and not own.is_met)
        return Outcome(best, best if is_certain else own, gain)

    def _known(self, candidate: Candidate) -> CandidateResult:
        trials = self._of[candidate.number]
        measured = [each for each in trials if each.ending == "measured"]
        if measured:
            logs = [math.log(each.value) for each in measured]
            within = math.sqrt(sum(each.spread**2 for each in measured)) / len(measured)
            return CandidateResult(
                candidate,
                "measured",
                num_measured=len(measured),
                value=math.exp(sum(logs) / len(logs)),
                error=max(within, self._spread / math.sqrt(len(measured))),
                is_met=2 * sum(each.is_met for each in measured) > len(measured),
            )
        own = [each for each in trials if each.ending != "lost"]
        if own:
            return CandidateResult(candidate, "failed", own[0].reason)
        if len(trials) >= MOST_LOST:
            return CandidateResult(candidate, "failed", trials[-1].reason)
        reason = self._why_left_out(candidate)
        return CandidateResult(candidate, "left_out" if reason else "untried", reason)

    def _why_left_out(self, candidate: Candidate) -> str:
        """Return why a candidate would fail as another one did, or ""."""
        for each in self.observations:
            other = next(one for one in self.candidates if one.number == each.candidate)
            if each.ending == "memory" and candidate.peak_bytes >= other.peak_bytes:
                return (
                    f"It needs {candidate.peak_bytes / GIB:.2f} GiB by the plan, and candidate "
                    f"{other.number}, with {other.peak_bytes / GIB:.2f} GiB, ran out of memory."
                )
            if each.ending == "failed" and other.settings.items() <= candidate.settings.items():
                return f"It has all that candidate {other.number} has, which failed."
        return ""

    @cached_property
    def _spread(self) -> float:
        """Return the standard deviation of one measurement, as a share of its value."""
        squares, freedom = USUAL_SPREAD**2, 1
        for trials in self._of.values():
            logs = [math.log(each.value) for each in trials if each.ending == "measured"]
            if len(logs) > 1:
                mean = sum(logs) / len(logs)
                squares += sum((each - mean) ** 2 for each in logs)
                freedom += len(logs) - 1
        return math.sqrt(squares / freedom)

    def _score(self, result: CandidateResult) -> float:
        """Return the logarithm of a value, larger for the better one."""
        return self._sign * math.log(result.value)

    def _rank(self, result: CandidateResult) -> tuple[bool, float, int]:
        return result.is_met, self._score(result), -result.candidate.number

    def _ranked(self, *states: CandidateState) -> list[CandidateResult]:
        chosen = [each for each in self.results if each.state in states]
        return sorted(chosen, key=self._rank, reverse=True)

    def _behind(self, each: CandidateResult, best: CandidateResult) -> CandidateResult:
        """Return a measured candidate, as behind if it is worse by more than the noise."""
        if best.is_met and not each.is_met:
            why = "It misses the latency targets, which the best one meets."
            return CandidateResult(**{**vars(each), "state": "behind", "reason": why})
        distance = self._score(best) - self._score(each)
        noise = NORMAL_80 * math.hypot(each.error, best.error)
        if distance <= noise:
            return each
        why = (
            f"It is {_percent(1.0 - math.exp(-distance))} worse than candidate "
            f"{best.candidate.number}, more than the noise of {_percent(noise)}."
        )
        return CandidateResult(**{**vars(each), "state": "behind", "reason": why})

    def _gain(self, best: CandidateResult, own: CandidateResult) -> Gain:
        log_ratio = math.log(best.value / own.value)
        noise = NORMAL_80 * math.hypot(best.error, own.error)
        value, *ends = (math.exp(log_ratio + each) - 1.0 for each in (0.0, -noise, noise))
        if self.less_is_better:
            return Gain(-value, -ends[1], -ends[0])
        return Gain(value, ends[0], ends[1])


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
