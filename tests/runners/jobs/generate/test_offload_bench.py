"""The bench of a policy asks the planner, gives both ways one cap, and compares like with like."""

import contextlib
import json
import subprocess
import sys
from dataclasses import replace

import pytest

from planner.api import estimate
from runners.jobs import offload_bench
from runners.jobs.generate.offload_cases import DTYPE, Order, answers_of, prompts_of
from runners.jobs.generate.offload_process import BenchProcess, BenchProcessError
from runners.jobs.loading import demo_config, fresh_model
from runners.jobs.offload_bench import Effort, best_batch, in_turns, policy_of, question, rooms
from runners.jobspec import DemoModel
from runners.jobspec.generate import PolicyOffload

MB = 10**6
MACHINE = {
    "memory_bandwidth_bytes_per_second": 20e9,
    "peak_flops_per_second": {"bf16": 3e11},
    "host_to_device_bandwidth_bytes_per_second": 10e9,
    "runtime_overhead_bytes": 450 * MB,
    "provenance": "measured",
    "disk_bandwidth_bytes_per_second": 1e9,
}
TINY = Effort(
    shape=DemoModel(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=512,
        max_position_embeddings=64,
    ),
    cap_bytes=800 * MB,
    num_prompts=4,
    input_tokens=8,
    output_tokens=3,
    rounds=1,
)


def test_the_planner_puts_on_disk_what_the_cap_does_not_hold():
    request = question(Effort(), dict(MACHINE))

    policy = policy_of(request)

    assert policy.weights_disk + policy.kv_disk > 0
    assert policy.weights_cpu + policy.kv_cpu < 0.001  # there is no memory beside the cap
    assert Effort().num_prompts % policy.micro_batch_size == 0


def test_a_cap_that_nothing_fits_is_told():
    with pytest.raises(RuntimeError, match="the planner has no policy for this cap"):
        policy_of(question(Effort(cap_bytes=300 * MB), dict(MACHINE)))


def test_accelerates_map_has_all_of_the_cap_that_its_batch_leaves():
    effort = Effort()
    request = question(effort, dict(MACHINE))

    found = rooms(effort, request)

    assert list(found) == [64, 32, 16, 8]
    assert sorted(found.values()) == list(found.values())
    held = estimate(request).memory.breakdown_bytes
    assert found[64] + sum(held.values()) - held["weights"] == effort.cap_bytes


def test_under_the_cap_accelerate_reads_its_weights_for_each_of_several_batches():
    effort = Effort()
    request = question(effort, dict(MACHINE))

    fitting = {size for size, room in rooms(effort, request).items() if room > 200 * MB}

    assert max(fitting) <= effort.num_prompts // 4
    assert policy_of(request).weights_disk < 1.0  # while ours reads them once for the whole pile


@pytest.fixture(scope="module")
def orders(tmp_path_factory):
    """Return both ways' orders over one tiny model."""
    folder = tmp_path_factory.mktemp("bench") / "model"
    fresh_model(demo_config(TINY.shape), DTYPE).save_pretrained(str(folder))
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    order = Order(
        folder=str(folder),
        scratch=str(folder.parent),
        num_prompts=TINY.num_prompts,
        input_tokens=TINY.input_tokens,
        output_tokens=TINY.output_tokens,
        vocab_size=TINY.shape.vocab_size,
    )
    policy = PolicyOffload(weights_disk=0.5, kv_disk=1.0, micro_batch_size=2)
    theirs = {"memory_bytes": int(0.6 * weights), "batch_size": 2}
    return order.model_copy(update={"policy": policy}), order.model_copy(update=theirs)


def test_both_ways_write_the_same_and_only_ours_says_what_lay_where(orders):
    (ours, figures), (theirs, none) = map(answers_of, orders)
    pile = prompts_of(orders[0])

    assert ours(pile) == theirs(pile)
    assert figures()["kv_disk"] == 1.0
    assert none() == {}


@pytest.fixture
def running():
    """A way whose process runs a line of code, until the test is over."""
    with contextlib.ExitStack() as ending:

        def begin(code):
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            way = BenchProcess(process, process.stdin, process.stdout)
            ending.callback(way.end)
            return way

        yield begin


@pytest.fixture
def way_of(running):
    """A way that says prepared rounds, one each time it is asked."""

    def begin(*rounds):
        said = enumerate(rounds, start=1)
        lines = [
            json.dumps({"processor_seconds": 1, "read_bytes": at * MB, **each})
            for at, each in said
        ]
        return running(
            f"import sys\nfor line in {lines!r}:\n  sys.stdin.readline(); print(line, flush=True)"
        )

    return begin


def answered(seconds, *answers, **more):
    return {"seconds": seconds, "answers": list(answers), "figures": {}, **more}


def test_the_first_round_of_each_way_is_not_counted(way_of):
    effort = replace(TINY, num_prompts=2, rounds=2)
    theirs = way_of(*(answered(each, "a", "b") for each in (50.0, 8.0, 2.0)))
    ours = way_of(*(answered(each, "a", "b") for each in (0.1, 2.0, 2.0)))

    found, read = in_turns([theirs, ours], effort)

    assert (found.value, found.n, found.of) == (pytest.approx(2.0), 2, "seconds")
    assert (read.value, read.n, read.of) == (pytest.approx(1.0), 2, "bytes read from disk")


def test_bytes_are_those_that_each_round_read_more(way_of):
    effort = replace(TINY, num_prompts=1, rounds=2)
    theirs = way_of(*(answered(1.0, "a", read_bytes=each) for each in (900, 1300, 1700)))
    ours = way_of(*(answered(1.0, "a", read_bytes=each) for each in (500, 600, 700)))

    _seconds, read = in_turns([theirs, ours], effort)

    assert read.value == pytest.approx(4.0)


def test_where_all_is_in_memory_no_bytes_are_compared(way_of):
    effort = replace(TINY, num_prompts=1, rounds=1)
    theirs = way_of(*(answered(1.0, "a", read_bytes=500) for _ in range(2)))

    (found,) = in_turns([theirs, way_of(answered(1.0, "a"), answered(1.0, "a"))], effort)

    assert found.of == "seconds"


def test_ways_that_write_different_text_are_not_compared(way_of):
    effort = replace(TINY, num_prompts=2, rounds=1)
    theirs, ours = way_of(answered(1.0, "a", "b")), way_of(answered(1.0, "a", "c"))

    with pytest.raises(RuntimeError, match="only 50% of the answers are the same"):
        next(in_turns([theirs, ours], effort))


def test_a_way_that_dies_is_told(way_of):
    with pytest.raises(BenchProcessError, match="a benchmark case ended with 0"):
        way_of().run()


def test_a_way_that_died_before_it_was_asked_is_told(running):
    way = running("raise SystemExit(5)")
    with pytest.raises(BenchProcessError):
        way.receive()

    with pytest.raises(BenchProcessError, match="a benchmark case ended with 5"):
        way.run()


def test_a_way_that_takes_longer_than_it_may_is_killed_and_told(running):
    way = running("import sys, time; sys.stdin.readline(); time.sleep(600)")

    with pytest.raises(BenchProcessError, match=r"ended with -9 .*or it took too long"):
        way.run(patience_seconds=0.2)


class Tried:
    """Stands for capped ways: what of a map's room kills it, and the seconds of one batch.

    A map above ``worn_bytes`` dies only of the whole pile.
    """

    def __init__(self, way_of, deadly_bytes, seconds, worn_bytes=10**12):
        self.way_of = way_of
        self.deadly_bytes, self.worn_bytes = deadly_bytes, worn_bytes
        self.seconds, self.orders = seconds, []

    @contextlib.contextmanager
    def __call__(self, order, _cap_bytes):
        self.orders.append(order)
        rounds = [answered(self.seconds[order.batch_size], "a")] * 2
        whole = order.num_prompts > order.batch_size
        deadly = self.worn_bytes if whole else self.deadly_bytes
        yield self.way_of(*([] if order.memory_bytes > deadly else rounds))


SECONDS = {64: 20.0, 32: 9.0, 16: 4.0, 8: 3.0}


def test_a_map_that_is_killed_is_given_less_and_the_soonest_batch_is_taken(
    monkeypatch, orders, way_of
):
    effort, tried = Effort(), Tried(way_of, 180 * MB, SECONDS)
    monkeypatch.setattr(offload_bench, "capped", tried)

    found = best_batch(effort, question(effort, dict(MACHINE)), orders[1])

    assert found["batch_size"] == 16  # 4 x 4 s beat 20 s, 2 x 9 s and 8 x 3 s
    assert found["memory_bytes"] <= 180 * MB
    *trials, whole = tried.orders
    assert all(each.num_prompts == each.batch_size for each in trials)
    assert (whole.num_prompts, whole.batch_size) == (orders[1].num_prompts, 16)


def test_a_map_that_keeps_its_pace_for_one_batch_only_gives_way_to_the_next(
    monkeypatch, orders, way_of
):
    effort = Effort()
    order = orders[1].model_copy(update={"num_prompts": effort.num_prompts})
    tried = Tried(way_of, 180 * MB, SECONDS, worn_bytes=120 * MB)
    monkeypatch.setattr(offload_bench, "capped", tried)

    found = best_batch(effort, question(effort, dict(MACHINE)), order)

    assert found["memory_bytes"] <= 120 * MB
    wholes = [each for each in tried.orders if each.num_prompts > each.batch_size]
    assert len(wholes) > 1
    assert [each.memory_bytes > 120 * MB for each in wholes] == [True] * (len(wholes) - 1) + [
        False
    ]


def test_a_cap_under_which_every_map_is_killed_is_told(monkeypatch, orders, way_of):
    effort = Effort()
    monkeypatch.setattr(offload_bench, "capped", Tried(way_of, 0, dict.fromkeys(SECONDS, 1.0)))

    with pytest.raises(RuntimeError, match="map answers nothing in 720000000 bytes; raise cap"):
        best_batch(effort, question(effort, dict(MACHINE)), orders[1])
