"""A search finds the limit of a simulated server in a dozen measurements, and says how sure."""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from runners.jobspec.compress import LoadLimit, LoadReport, LoadRow
from runners.shared.load_search import LevelSearch, excess_of, limit_words

SEED, CASES, DISTURBED = 20261130, 200, 0.05
MOST, HIGHEST = 12, 1024.0
STEP = 1.01  # between the levels of an exhaustive sweep of rates


class Server(NamedTuple):
    """An M/M/1 queue, or a batch whose steps slow down with the clients; latency over target."""

    limit_like: float  # where the latency would be at its target
    kind: str

    def excess(self, level: float) -> float:
        if self.kind == "batch":  # linear in the clients from half of the target
            return 0.5 + 0.5 * level / self.limit_like
        saturation = 1.25 * self.limit_like  # 1 / (saturation - level), which has a pole
        return math.inf if level >= saturation else 0.25 * saturation / (saturation - level) / 1.25


def servers(source: random.Random) -> Iterator[tuple[Server, float, bool]]:
    """Yield random servers, each with a first level of up to 64 times its limit, or a 64th."""
    for kind in itertools.islice(itertools.cycle(("queue", "batch")), CASES):
        is_whole = source.random() < 0.5
        limit = math.exp(source.uniform(math.log(1.5), math.log(800.0)))
        first = min(1024.0, limit * math.exp(source.uniform(-1, 1) * math.log(64.0)))
        yield Server(limit, kind), max(1.0, round(first)) if is_whole else first, is_whole


def noisily(server: Server, source: random.Random, noise: float, level: float) -> list[float]:
    """Return three repetitions; with noise one in twenty is disturbed: 1.5 to 5 times as long."""
    return [
        server.excess(level)
        * math.exp(source.gauss(0.0, noise))
        * (source.uniform(1.5, 5.0) if noise and source.random() < DISTURBED else 1.0)
        for _ in range(3)
    ]


def swept(server: Server, is_whole: bool) -> float:
    """Return the highest level that an exhaustive sweep without noise finds met; 0 if none."""
    rates = (HIGHEST / STEP**at for at in range(2000))
    levels = range(1, round(HIGHEST) + 1) if is_whole else rates
    return max((each for each in levels if server.excess(each) <= 1.0), default=0.0)


def searched(
    measure: Callable[[float], list[float]],
    first: float,
    *,
    is_whole: bool = True,
    **options: float,
) -> tuple[LevelSearch, list[float]]:
    """Return a search that has ended, and the levels it measured; repeated ones are pooled."""
    limits = {"highest": HIGHEST, "max_points": MOST, **options}
    search = LevelSearch(first, is_whole=is_whole, **limits)
    levels: list[float] = []
    seen: dict[float, list[float]] = {}
    while (level := search.next_level()) is not None:
        levels.append(level)
        known = seen.setdefault(level, [])
        known += measure(level)
        search.record(level, known)
    return search, levels


def test_the_limit_is_within_a_tenth_of_the_exhaustive_sweep_in_a_dozen_measurements():
    for noise, least in ((0.0, 1.0), (0.02, 0.97), (0.05, 0.95)):
        source, num_good = random.Random(SEED), 0  # noqa: S311 (the same servers again)
        for server, first, is_whole in servers(source):
            measure = partial(noisily, server, source, noise)
            search, levels = searched(measure, first, is_whole=is_whole)
            case = (server, first, is_whole, noise, levels)
            assert len(levels) <= MOST, case
            assert max(levels.count(each) for each in levels) <= 2, case
            known, true = search.met or 0.0, swept(server, is_whole)
            num_good += known == true or max(known, true) <= 1.1 * min(known, true)
        assert num_good >= least * CASES, (noise, num_good, SEED)


def test_a_search_doubles_or_halves_and_bisects_and_measures_only_what_is_close_twice():
    for limit, first, options, levels, ending in (
        (12.0, 4.0, {}, [4, 8, 16, 11, 13, 12, 12], "found"),  # 12 is at its target
        (3.4, 100.0, {}, [100, 50, 25, 12, 6, 3, 4], "found"),
        (0.4, 8.0, {}, [8, 4, 2, 1], "lowest"),
        (99.0, 4.0, {"highest": 20.0}, [4, 8, 16, 20], "highest"),
        (99.0, 1.0, {"max_points": 3}, [1, 2, 4], "points"),
        (
            0.8,
            1.0,
            {"is_whole": False},
            [1, 0.5, 0.707, 0.841, 0.771, 0.771, 0.805, 0.805],
            "found",
        ),
    ):
        search, found = searched(lambda level, limit=limit: [level / limit], first, **options)
        assert (found, search.ending) == (levels, ending), (limit, first)
        assert search.met is None or search.met <= limit, limit
        assert search.missed is None or search.missed > limit, limit


def test_a_level_that_is_close_is_decided_by_both_measurements_and_stays_decided_in_time():
    search = LevelSearch(8.0, highest=64.0, is_whole=True, max_points=12)
    search.record(8.0, [1.03])
    assert (search.next_level(), search.missed, search.ending) == (8.0, 8.0, "seconds")
    search.record(8.0, [1.03, 0.99, 0.98])
    assert (search.met, search.missed, search.next_level()) == (8.0, None, 16.0)


def test_an_unanswered_request_or_figure_misses_every_target():
    targets = {"ttft_p95_seconds": 1.0, "tpot_p95_seconds": 0.05}
    measured = {"ttft_p95_seconds": 0.5, "tpot_p95_seconds": 0.06}
    assert excess_of(targets, measured, failed=0) == 0.06 / 0.05
    assert excess_of(targets, measured, failed=1) == math.inf
    assert excess_of(targets, {"ttft_p95_seconds": 0.5}, failed=0) == math.inf


def test_what_was_found_is_said_and_not_more():
    row = LoadRow(point=1, requests=1, failed=0, repetitions=1, duration_seconds=1.0, measured={})
    spent = "; the search ended there, at its"
    highest = "The targets are met at every level that was tried, up to 64"
    for arrivals, met, missed, ending, words in (
        ("closed", 12, 13, "found", "The limit lies between 12 and 13 clients"),
        ("open", 0.5, 1, "seconds", f"The limit lies between 0.5 and 1 request a second{spent}"),
        ("closed", 64, None, "highest", f"{highest} clients, the most that the endpoint has"),
        ("open", 64, None, "points", f"{highest} requests a second{spent} limit of measurements"),
        ("closed", None, 1, "lowest", "The targets are missed at the lowest level that was tried"),
    ):
        limit = LoadLimit(targets={"ttft_p95_seconds": 1.0}, met=met, missed=missed, ending=ending)
        lengths = {"prompt_tokens": 1, "output_tokens": 1, "places": 1, "seed": 1}
        report = LoadReport(arrivals=arrivals, rows=(row,), limit=limit, **lengths)
        assert limit_words(report).startswith(words)
