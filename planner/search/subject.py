"""What the last questions costed, so that another target, objective or pin costs little.

A strategy of one model, hardware and workload costs the same whatever is asked about it. What was
scored and costed of such a subject is kept by the process and read again, never mixed up: two
subjects are one only where everything is equal that an estimate reads.
"""

from collections.abc import Callable
from threading import Lock
from typing import cast

from planner.search.question import Question
from planner.specs.estimate import Estimate, Performance
from planner.specs.strategy import Strategy
from planner.specs.workload import ServeWorkload
from planner.workload.estimator import Costing
from planner.workload.under_load import percentiles_alone

# Enough for a question and the changes that it suggests, and for what a few people ask at once.
MAX_SUBJECTS = 64
MAX_STRATEGIES = 20_000  # scored ones of all subjects: a few hundred bytes each
MAX_ESTIMATES = 512  # of each kind and subject: some kilobytes each
MAX_COSTINGS = 32  # of each of the latest subjects: up to a hundred kilobytes each
LATEST = 16


class Subject:
    """One model, hardware and workload: what was scored and costed of it so far.

    ``plain`` holds estimates without percentiles, ``simulated`` with them, ``told`` with the
    terms of their explanation as well, and ``costings`` what all three are made of; ``scored``
    is what the search found under some pins.
    """

    def __init__(self, key: tuple[object, ...] = ()) -> None:
        self.key = key
        self.plain: dict[Strategy, Estimate] = {}
        self.simulated: dict[Strategy, Estimate] = {}
        self.told: dict[Strategy, Estimate] = {}
        self.costings: dict[Strategy, Costing] = {}
        self.scored: list[tuple[tuple[object, ...], object, int]] = []

    @property
    def strategies(self) -> int:
        """Return how many scored strategies are kept."""
        return sum(rows for _, _, rows in self.scored)

    def exact(self, question: Question, strategy: Strategy) -> Estimate:
        """Return a strategy as the exact door costs it, without percentiles and terms."""
        return _kept(
            self.plain,
            strategy,
            lambda: self._costing(question, strategy).estimate(explain=False),
        )

    def with_percentiles(self, question: Question, strategy: Strategy) -> Estimate:
        """Return a strategy as the exact door costs it, without terms."""

        def cost() -> Estimate:
            told = self.told.get(strategy)
            if told is not None:
                return told.model_copy(update={"terms": ()})
            return self._costing(question, strategy).estimate(explain=False, simulate=True)

        return _kept(self.simulated, strategy, cost)

    def percentiles(
        self, question: Question, strategy: Strategy, means: Performance
    ) -> dict[str, float]:
        """Return the percentiles, in s by name, of a serving strategy whose means are known."""
        setting = self._costing(question, strategy).setting
        return percentiles_alone(setting, cast("ServeWorkload", setting.workload), means)

    def explained(self, question: Question, strategy: Strategy) -> Estimate:
        """Return a strategy as the exact door costs it, with every term."""
        return _kept(self.told, strategy, lambda: self._costing(question, strategy).estimate())

    def _costing(self, question: Question, strategy: Strategy) -> Costing:
        """Return the costs of a strategy, as far as they were asked for before."""
        found = self.costings.get(strategy)
        if found is None:
            found = Costing(question.estimate_request(strategy))
            if len(self.costings) < MAX_COSTINGS:
                self.costings[strategy] = found
        return found


def _kept(
    known: dict[Strategy, Estimate], strategy: Strategy, cost: Callable[[], Estimate]
) -> Estimate:
    found = known.get(strategy)
    if found is None:
        found = cost()
        if len(known) < MAX_ESTIMATES:
            known[strategy] = found
    return found


class Recent:
    """The subjects that were asked about last, the latest at the end; safe between threads."""

    def __init__(self) -> None:
        self.subjects: list[Subject] = []
        self._lock = Lock()

    def of(self, question: Question) -> Subject:
        """Return the subject of a question, known or new."""
        key = subject_key(question)
        with self._lock:
            found = next((one for one in self.subjects if one.key == key), None)
            if found is None:
                found = Subject(key)
            else:
                self.subjects.remove(found)
            self.subjects.append(found)
            for older in self.subjects[-2 * LATEST : -LATEST]:
                older.costings.clear()
            self._forget_oldest()
        return found

    def scored(self, subject: Subject, under: tuple[object, ...]) -> object:
        """Return what was scored of a subject under the same pins, or nothing."""
        return next((found for key, found, _ in subject.scored if key == under), None)

    def keep(self, subject: Subject, under: tuple[object, ...], found: object, rows: int) -> None:
        """Keep what was scored of a subject, unless it is too much."""
        if rows > MAX_STRATEGIES:
            return
        with self._lock:
            subject.scored.append((under, found, rows))
            self._forget_oldest()

    def forget(self) -> None:
        """Forget everything."""
        with self._lock:
            self.subjects.clear()

    def _forget_oldest(self) -> None:
        while len(self.subjects) > MAX_SUBJECTS or (
            sum(one.strategies for one in self.subjects) > MAX_STRATEGIES
        ):
            del self.subjects[0]


def subject_key(question: Question) -> tuple[object, ...]:
    """Return everything that the estimates of a question's strategies read, but the strategy."""
    request = question.request
    return (
        request.workload,
        question.cluster,
        question.shown,
        question.model,
        request.engine,
        request.host_calibration,
        request.id,
    )


RECENT = Recent()
