"""Memory and processor use of a tree from successive looks."""

from runners.supervision.procfs import CLOCK_TICKS_PER_SECOND, Process, TreeSampler


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def process(pid: int, cpu_seconds: float = 0.0, rss_bytes: int = 0, start: int = 1) -> Process:
    return Process(pid, 1, "R", start, round(cpu_seconds * CLOCK_TICKS_PER_SECOND), rss_bytes)


def sample(sampler: TreeSampler, clock: Clock, seconds: float, *tree: Process) -> dict[str, float]:
    clock.now += seconds
    return sampler.sample(tree)


def test_memory_is_summed_over_the_tree_and_its_peak_is_kept():
    clock = Clock()
    sampler = TreeSampler(clock)
    sample(sampler, clock, 1, process(1, rss_bytes=100), process(2, rss_bytes=50))

    values = sample(sampler, clock, 1, process(1, rss_bytes=20))

    assert values["rss_bytes"] == 20
    assert sampler.peak_rss_bytes == 150


def test_two_full_cores_are_a_utilisation_of_two():
    clock = Clock()
    sampler = TreeSampler(clock)
    sample(sampler, clock, 1, process(1, 5.0), process(2, 7.0))

    values = sample(sampler, clock, 2, process(1, 7.0), process(2, 9.0))

    assert values["cpu_utilization"] == 2.0


def test_a_process_that_got_an_old_pid_counts_from_its_own_start():
    clock = Clock()
    sampler = TreeSampler(clock)
    sample(sampler, clock, 1, process(1, 5.0, start=1))

    values = sample(sampler, clock, 1, process(1, 0.5, start=9))

    assert values["cpu_utilization"] == 0.5


def test_a_process_that_ended_does_not_make_the_use_negative():
    clock = Clock()
    sampler = TreeSampler(clock)
    sample(sampler, clock, 1, process(1, 5.0), process(2, 9.0))

    assert sample(sampler, clock, 1, process(1, 5.0))["cpu_utilization"] == 0.0
