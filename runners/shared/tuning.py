"""A tuning: which candidate is measured next, which are left out and why, and what was found.

It reads no clock and starts no job: jobs measure the candidates, and the planner predicts them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Literal

import numpy as np

BASELINE = 0  # number of the plan's own choice
REPEATS = 2  # least measurements, after the first, of each of the two that a gain is claimed of
MOST_EACH = 4  # measurements of one candidate
# Of one measurement, as a share of its value, before any was repeated; as good as one repetition
USUAL_SPREAD = 0.02
LEAST_SPREAD = 0.005  # of one measurement, however well the repeated ones agree
NORMAL_80 = 1.282  # half of an 80 % interval, in standard deviations
ONE_SIDED = 0.05  # of a 90 % interval
# Standard deviations of the logarithm of the figure: what the planner misjudges on this host in
# every candidate, in each setting, and in what settings do together.
HOST_ERROR, SETTING_ERROR, JOINT_ERROR = 1.0, 0.15, 0.03
ROOMY = 16  # trials of a budget that keeps a repetition more
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
    """What is known of a candidate; ``value`` is the geometric mean of its repeated measurements.

    The first one has chosen the candidate, so it counts only until it is repeated. ``error``: the
    standard error of the value, as a share of it.
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
    """The gain of a candidate over the plan's own choice, as a share of that, with 90 % interval.

    Of a figure of which less is better, it is the share that is saved.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Outcome:
    """What a tuning has found: ``chosen`` is the plan's own choice without a certain gain.

    None: nothing was measured. ``gain``: of the best, None if the plan's own choice was not
    measured. ``num_missing``: the measurements that the best and the plan's own choice lack before
    a gain may be claimed.
    """

    best: CandidateResult | None
    chosen: CandidateResult | None
    gain: Gain | None
    num_missing: int = 0


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

        First each is measured once, while enough is left to measure the best again. Then the best
        of them and the plan's own choice are measured again, in turn and equally often, whatever
        the repeated measurements say of the two: to stop as soon as they differ would make noise
        a gain. One that falls back behind another lets that one in. If none is better than the
        plan's own choice, what is left goes to those that were not tried.
        """
        untried = self._most_promising()
        has_repeats = any(self._repeats(each) for each in self.candidates)
        if untried is not None and not has_repeats and self._has_room():
            return untried
        if not self._contenders:
            return untried
        own = [each for each in self._own if self._lacks_repeats(each)]
        lacking = [*own, *self._challengers[:1]]
        return min(lacking, key=lambda each: len(self._repeats(each)), default=None)

    def _most_promising(self) -> Candidate | None:
        """Return the candidate to try next, None if all were tried or are left out.

        The plan's own choice comes first, then each setting by itself, once: the planner may be
        wrong about any. Then the expectation decides.
        """
        untried = [each.candidate for each in self.results if each.state == "untried"]
        if not untried or untried[0].number == BASELINE:
            return untried[0] if untried else None
        begun = (each for each in self.candidates if self._of[each.number])
        tried = {name for each in begun if len(each.settings) == 1 for name in each.settings}
        for each in untried:
            if len(each.settings) == 1 and not each.settings.keys() & tried:
                return each
        return max(untried, key=lambda each: self._beliefs[each.number].mean)

    @cached_property
    def _beliefs(self) -> Mapping[int, "_Belief"]:
        """Return what to expect of each candidate by its prediction and all measurements.

        A linear regression with normal priors: the logarithm of a figure is the predicted one and
        the planner's errors in all candidates, in each setting and in what settings do together.
        So the best of many first measurements is expected to be as far above its neighbours as
        noise leaves likely, and what a setting has shown counts wherever it is.
        """
        settings = [each.settings.items() for each in self.candidates]
        kinds = list({setting for each in settings for setting in each})
        has = np.array([[kind in each for kind in kinds] for each in settings], dtype=float)
        prior = HOST_ERROR**2 + SETTING_ERROR**2 * has @ has.T
        prior += JOINT_ERROR**2 * np.eye(len(settings))
        mean = np.array([self._sign * math.log(each.predicted) for each in self.candidates])
        variance = np.diag(prior)
        trials = [self._measured(each) for each in self.candidates]
        known = [at for at, each in enumerate(trials) if each]
        if known:
            scores = [self._sign * _mean_log(trials[at]) for at in known]
            noise = np.diag([self._noise_of(trials[at]) ** 2 for at in known])
            weights = np.linalg.solve(prior[np.ix_(known, known)] + noise, prior[known])
            mean = mean + weights.T @ (scores - mean[known])
            variance = variance - (prior[known] * weights).sum(axis=0)
        return {
            each.number: _Belief(_is_met(trials[at]), mean[at], math.sqrt(max(0.0, variance[at])))
            for at, each in enumerate(self.candidates)
        }

    @property
    def _sign(self) -> float:
        return -1.0 if self.less_is_better else 1.0

    def _has_room(self) -> bool:
        """Return whether another first measurement leaves enough to measure the best again.

        A budget too small for that claims no gain, and measures as many as it can.
        """
        least = 2 + 2 * REPEATS
        kept = 2 * (REPEATS + (self.max_trials >= ROOMY)) if self.max_trials >= least else 0
        has_trials = len(self.observations) + kept < self.max_trials
        return has_trials and (1 + kept) * self.trial_seconds < self.seconds_left

    @property
    def _own(self) -> list[Candidate]:
        """Return the plan's own choice once it is measured, else none."""
        return [each for each in self.candidates[:1] if self._measured(each)]

    @cached_property
    def _contenders(self) -> list[Candidate]:
        """Return those that may be better than the plan's own choice, the most likely first."""
        own = [self._beliefs[each.number] for each in self._own]
        measured = [each for each in self.candidates if self._measured(each) and each.number]
        sound = [each for each in measured if self._is_sound(each)]
        good = [each for each in sound if not any(map(self._beliefs[each.number].is_behind, own))]
        return sorted(good, key=self._likely, reverse=True)

    @property
    def _challengers(self) -> list[Candidate]:
        """Return the contenders to measure again, the next one first.

        None, once those that the noise does not tell from the best are measured often enough.
        What is left of the budget must do for as many repetitions as a gain needs.
        """
        best = self._beliefs[self._contenders[0].number]
        lacking = [each for each in self._contenders if self._lacks_repeats(each)]
        if all(self._beliefs[each.number].is_behind(best) for each in lacking):
            return []
        own = sum(map(self._num_missing, self._own))
        fitting = [each for each in lacking if self._num_missing(each) + own <= self._trials_left]
        return fitting or [each for each in lacking if self._repeats(each)] or lacking

    def _likely(self, candidate: Candidate) -> tuple[bool, float, int]:
        belief = self._beliefs[candidate.number]
        return belief.is_met, belief.mean, -candidate.number

    def _num_missing(self, candidate: Candidate) -> int:
        """Return the measurements that a candidate lacks before a gain may be claimed of it."""
        return max(0, REPEATS - max(0, len(self._measured(candidate)) - 1))

    @property
    def _trials_left(self) -> int:
        """Return how many trials the budget still allows, as long as those before them."""
        num_left = self.max_trials - len(self.observations)
        seconds = self.trial_seconds
        return min(num_left, math.ceil(self.seconds_left / seconds)) if seconds else num_left

    def _measured(self, candidate: Candidate) -> list[Observation]:
        return [each for each in self._of[candidate.number] if each.ending == "measured"]

    def _repeats(self, candidate: Candidate) -> list[Observation]:
        """Return the trials of a candidate after its first measurement."""
        trials = self._of[candidate.number]
        first = next((at for at, each in enumerate(trials) if each.ending == "measured"), None)
        return [] if first is None else trials[first + 1 :]

    def _is_sound(self, candidate: Candidate) -> bool:
        """Return whether no repeated trial of a candidate has failed."""
        return all(each.ending in {"measured", "lost"} for each in self._repeats(candidate))

    def _lacks_repeats(self, candidate: Candidate) -> bool:
        repeats = self._repeats(candidate)
        num_lost = sum(each.ending == "lost" for each in repeats)
        is_given_up = num_lost >= MOST_LOST or not self._is_sound(candidate)
        return not is_given_up and len(repeats) - num_lost < MOST_EACH - 1

    # What is known of each candidate

    @cached_property
    def results(self) -> list[CandidateResult]:
        """Return what is known of each candidate, in the order of the candidates."""
        found = [self._known(each) for each in self.candidates]
        measured = [each for each in found if each.state == "measured"]
        if not measured:
            return found
        best = max(measured, key=lambda each: (each.num_measured > REPEATS, *self._rank(each)))
        return [self._behind(each, best) if each.state == "measured" else each for each in found]

    @cached_property
    def outcome(self) -> Outcome:
        """Return what was found so far."""
        ranked = self._ranked("measured", "behind")
        if not ranked:
            return Outcome(None, None, None)
        own = next((each for each in ranked if each.candidate.number == BASELINE), None)
        repeated = [each for each in self._contenders if not self._num_missing(each)]
        contenders = {each.number for each in (repeated or self._contenders)[:1]}
        best = next((each for each in ranked if each.candidate.number in contenders), None)
        if own is None:
            best = best or ranked[0]
            return Outcome(best, best, None)
        if best is None or self._rank(best) < self._rank(own):
            return Outcome(own, own, Gain(0.0, 0.0, 0.0))
        gain = self._gain(best, own)
        if missing := sum(self._num_missing(each.candidate) for each in (best, own)):
            return Outcome(best, own, gain, missing)
        is_certain = gain.low > 0.0 and best.is_met >= own.is_met
        return Outcome(best, best if is_certain or self._only_meets(best, own) else own, gain)

    def _only_meets(self, best: CandidateResult, own: CandidateResult) -> bool:
        """Return whether all repeated trials of the best meet the targets, and none of the own."""
        met = [[one.is_met for one in self._measured(each.candidate)[1:]] for each in (best, own)]
        return all(met[0]) and not any(met[1])

    def _known(self, candidate: Candidate) -> CandidateResult:
        trials = self._of[candidate.number]
        measured = self._measured(candidate)
        if measured:
            return self._of_measured(candidate, measured)
        own = [each for each in trials if each.ending != "lost"]
        if own:
            return CandidateResult(candidate, "failed", own[0].reason)
        if len(trials) >= MOST_LOST:
            return CandidateResult(candidate, "failed", trials[-1].reason)
        reason = self._why_left_out(candidate)
        return CandidateResult(candidate, "left_out" if reason else "untried", reason)

    def _of_measured(
        self, candidate: Candidate, measured: Sequence[Observation]
    ) -> CandidateResult:
        used = measured[1:] or measured
        return CandidateResult(
            candidate,
            "measured",
            num_measured=len(measured),
            value=math.exp(_mean_log(used)),
            error=self._noise_of(used),
            is_met=_is_met(used),
        )

    def _noise_of(self, measured: Sequence[Observation]) -> float:
        """Return the standard error of the mean of some measurements, as a share."""
        return max(_within(measured), self._spread / math.sqrt(len(measured)))

    def _why_left_out(self, candidate: Candidate) -> str:
        """Return why a candidate would fail as another one did, or ""."""
        for each in self.observations:
            other = next(one for one in self.candidates if one.number == each.candidate)
            # The plan's own choice has no settings: what fails there says nothing of the others.
            is_own = other.number == BASELINE
            if each.ending == "memory" and candidate.peak_bytes >= other.peak_bytes:
                return (
                    f"It needs {candidate.peak_bytes / GIB:.2f} GiB by the plan, and candidate "
                    f"{other.number}, with {other.peak_bytes / GIB:.2f} GiB, ran out of memory."
                )
            has_all = other.settings.items() <= candidate.settings.items()
            if each.ending == "failed" and has_all and not is_own:
                return f"It has all that candidate {other.number} has, which failed."
        return ""

    @cached_property
    def _spread(self) -> float:
        """Return the standard deviation of one measurement, as a share of its value.

        Before any was repeated it is assumed, and that counts as one repetition.
        """
        squares, freedom = self._scatter
        return math.sqrt((USUAL_SPREAD**2 + squares) / (1 + freedom))

    @cached_property
    def _scatter(self) -> tuple[float, int]:
        """Return the squared deviations of the repeated measurements, and their freedom."""
        squares, freedom = 0.0, 0
        for candidate in self.candidates:
            logs = [math.log(each.value) for each in self._measured(candidate)[1:]]
            if logs:
                mean = sum(logs) / len(logs)
                squares += sum((each - mean) ** 2 for each in logs)
                freedom += len(logs) - 1
        return squares, freedom

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
        why = self._why_behind(each, best)
        return CandidateResult(**{**vars(each), "state": "behind", "reason": why}) if why else each

    def _why_behind(self, each: CandidateResult, best: CandidateResult) -> str:
        """Return why a candidate is worse than another by more than the noise, or ""."""
        if best.is_met and not each.is_met:
            return "It misses the latency targets, which the best one meets."
        if each.is_met and not best.is_met:
            return ""
        distance = self._score(best) - self._score(each)
        noise = NORMAL_80 * math.hypot(each.error, best.error)
        if distance <= noise:
            return ""
        return (
            f"It is {_percent(1.0 - math.exp(-distance))} worse than candidate "
            f"{best.candidate.number}, more than the noise of {_percent(noise)}."
        )

    def _gain(self, best: CandidateResult, own: CandidateResult) -> Gain:
        """Return a gain with the interval that the repeated measurements leave.

        It holds for all that were measured again at once (Bonferroni): the best of several is the
        one that noise has favoured.
        """
        squares, freedom = self._scatter
        spread = max(LEAST_SPREAD, math.sqrt(squares / freedom)) if freedom else USUAL_SPREAD
        errors = []
        for each in (best, own):
            measured = self._measured(each.candidate)
            used = measured[1:] or measured
            errors.append(max(_within(used), spread / math.sqrt(len(used))))
        noise = _student(max(freedom, 1), max(1, self._num_challengers)) * math.hypot(*errors)
        log_ratio = math.log(best.value / own.value)
        value, *ends = (math.exp(log_ratio + each) - 1.0 for each in (0.0, -noise, noise))
        if self.less_is_better:
            return Gain(-value, -ends[1], -ends[0])
        return Gain(value, ends[0], ends[1])

    @property
    def _num_challengers(self) -> int:
        """Return how many candidates besides the plan's own choice were measured again."""
        return sum(len(self._measured(each)) > 1 for each in self.candidates[1:])


@dataclass(frozen=True)
class _Belief:
    """What to expect of a candidate; ``mean`` and ``deviation`` are those of its score."""

    is_met: bool
    mean: float
    deviation: float

    def is_behind(self, best: "_Belief") -> bool:
        """Return whether a candidate is worse than the best one by more than the noise."""
        if self.is_met != best.is_met:
            return best.is_met
        return best.mean - self.mean > NORMAL_80 * math.hypot(self.deviation, best.deviation)


@cache
def _student(freedom: int, num_compared: int) -> float:
    """Return half of a 90 % interval, in standard errors, that holds for all comparisons."""
    from scipy.special import stdtrit  # which other decisions need not wait for

    return float(stdtrit(freedom, 1.0 - ONE_SIDED / num_compared))


def _mean_log(measured: Sequence[Observation]) -> float:
    return sum(math.log(each.value) for each in measured) / len(measured)


def _is_met(measured: Sequence[Observation]) -> bool:
    return 2 * sum(each.is_met for each in measured) > len(measured)


def _within(measured: Sequence[Observation]) -> float:
    """Return the standard error of a mean by the spread within its trials, as a share."""
    return math.sqrt(sum(each.spread**2 for each in measured)) / len(measured)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}\N{NO-BREAK SPACE}%"
