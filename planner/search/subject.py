"""Cache of scores and estimates, so that another target, objective or pin costs little.

The cost of a strategy depends only on model, hardware and workload (the subject). Scores and
estimates of a subject are cached in the process. Two subjects are equal only if every input of an
estimate is equal.
"""

from collections.abc import Callable
from threading import Lock

from planner.search.question import Question
from planner.specs.estimate import Estimate
from planner.specs.strategy import Strategy
from planner.workload.estimator import Costing

# Enough for a question with its suggestions, and for a few concurrent users.
MAX_SUBJECTS = 64
MAX_STRATEGIES = 20_000  # scored strategies of all subjects: a few hundred bytes each
MAX_ESTIMATES = 512  # per kind and subject: some kilobytes each
MAX_COSTINGS = 32  # per recent subject: up to a hundred kilobytes each
LATEST = 16


class Subject:
    """The cached scores and estimates of one model, hardware and workload.

    ``plain`` holds estimates without percentiles, ``simulated`` with percentiles, ``told`` with
    percentiles and terms. ``costings`` holds their common intermediate results, ``scored`` the
    search results by pins.
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
        """Return the number of cached scored strategies."""
        return sum(rows for _, _, rows in self.scored)

    def exact(self, question: Question, strategy: Strategy) -> Estimate:
        """Return the exact estimate of a strategy, without percentiles and terms."""
        return _cached_estimate(
            self.plain,
            strategy,
            lambda: self._costing(question, strategy).estimate(explain=False),
        )

    def with_percentiles(self, question: Question, strategy: Strategy) -> Estimate:
        """Return the exact estimate of a strategy, without terms."""

        def cost() -> Estimate:
            explained = self.told.get(strategy)
            if explained is not None:
                return explained.model_copy(update={"terms": ()})
            return self._costing(question, strategy).estimate(explain=False, simulate=True)

        return _cached_estimate(self.simulated, strategy, cost)

    def explained(self, question: Question, strategy: Strategy) -> Estimate:
        """Return the exact estimate of a strategy, with every term."""
        return _cached_estimate(
            self.told, strategy, lambda: self._costing(question, strategy).estimate()
        )

    def _costing(self, question: Question, strategy: Strategy) -> Costing:
        """Return the cached costing of a strategy, or a new one."""
        costing = self.costings.get(strategy)
        if costing is None:
            costing = Costing(question.estimate_request(strategy))
            if len(self.costings) < MAX_COSTINGS:
                self.costings[strategy] = costing
        return costing


def _cached_estimate(
    estimates: dict[Strategy, Estimate], strategy: Strategy, cost: Callable[[], Estimate]
) -> Estimate:
    estimate = estimates.get(strategy)
    if estimate is None:
        estimate = cost()
        if len(estimates) < MAX_ESTIMATES:
            estimates[strategy] = estimate
    return estimate


class EstimateCache:
    """The most recently used subjects, latest last; thread-safe."""

    def __init__(self) -> None:
        self.subjects: list[Subject] = []
        self._lock = Lock()

    def of(self, question: Question) -> Subject:
        """Return the cached or a new subject of a question."""
        key = subject_key(question)
        with self._lock:
            subject = next((cached for cached in self.subjects if cached.key == key), None)
            if subject is None:
                subject = Subject(key)
            else:
                self.subjects.remove(subject)
            self.subjects.append(subject)
            for older in self.subjects[-2 * LATEST : -LATEST]:
                older.costings.clear()
            self._evict_oldest()
        return subject

    def scored(self, subject: Subject, under: tuple[object, ...]) -> object:
        """Return the cached scores of a subject under the same pins, or None."""
        return next((found for key, found, _ in subject.scored if key == under), None)

    def keep(self, subject: Subject, under: tuple[object, ...], found: object, rows: int) -> None:
        """Cache the scores of a subject, unless they are too many."""
        if rows > MAX_STRATEGIES:
            return
        with self._lock:
            subject.scored.append((under, found, rows))
            self._evict_oldest()

    def forget(self) -> None:
        """Clear the cache."""
        with self._lock:
            self.subjects.clear()

    def _evict_oldest(self) -> None:
        while len(self.subjects) > MAX_SUBJECTS or (
            sum(subject.strategies for subject in self.subjects) > MAX_STRATEGIES
        ):
            del self.subjects[0]


def subject_key(question: Question) -> tuple[object, ...]:
    """Return all inputs of a question's estimates except the strategy."""
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


ESTIMATES = EstimateCache()
