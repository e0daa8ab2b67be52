"""A block that lies by a policy writes what it writes anyway, and its bench is fair."""

import contextlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from planner.api import estimate
from runners.jobs.bench import offload_bench
from runners.jobs.bench.offload_bench import (
    Effort,
    best_batch,
    in_turns,
    policy_of,
    question,
    rooms,
)
from runners.jobs.generate.offload_cases import (
    DTYPE,
    BenchProcess,
    BenchProcessError,
    Order,
    answers_of,
    prompts_of,
)
from runners.jobs.generate.placement import held_bytes
from runners.jobs.generate.stage_model import PackedTensor
from runners.jobs.generate.static import AnswerLimits, BatchSetup, StopRequestedError, run_batch
from runners.jobs.generate.zigzag import (
    PLACES,
    DiskStore,
    PolicyFigures,
    ZigZag,
    interleaved_places,
    pack_layer,
    unpack_layer,
)
from runners.jobs.loading import LayerwiseModel, demo_config, fresh_model, load_folder
from runners.jobs.runtime import BadInputError
from runners.jobspec import DemoModel, GenerateSpec
from runners.jobspec.generate import PolicyOffload
from tests.plugins.extent import combinations
from tests.runners.jobs.cases import refused
from tests.runners.jobs.tiny import TINY_CONFIG

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LAYERS = 6
PROMPTS = [[5, 7, 11, 13], [17, 19, 23], [1, 2, 3, 4, 5, 6], [9], [8, 10]]
LIMITS = AnswerLimits(8)
SPREAD = {"weights_cpu": 0.3, "weights_disk": 0.4, "kv_cpu": 0.25, "kv_disk": 0.5}
SHARES = (
    {"weights_disk": 1.0},
    {"weights_cpu": 1.0, "activations_cpu": 1.0},
    {"kv_cpu": 1.0},
    {"kv_disk": 1.0},
    {**SPREAD, "activations_cpu": 0.5},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder of six layers."""
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("policy") / "model"
    config = {**TINY_CONFIG, "num_hidden_layers": LAYERS}
    fresh_model(config, torch.float32).save_pretrained(str(path))
    return path


@pytest.fixture
def block(folder, tmp_path):
    """Return the model of a policy."""

    def made(dtype="fp32", kv_cache="plain", *, is_narrow=False, **asked) -> ZigZag:
        scratch = Path(tmp_path / f"scratch-{len(list(tmp_path.iterdir()))}")
        scratch.mkdir()
        skeleton = LayerwiseModel(folder, CPU, DTYPES[dtype])
        policy = PolicyOffload(**asked)
        return ZigZag(skeleton, folder, policy, scratch, kv_cache=kv_cache, is_narrow=is_narrow)

    return made


@pytest.mark.equality
def test_wherever_a_block_lies_it_writes_what_the_device_alone_writes(folder, block):
    wanted = {
        dtype: run_batch(load_folder(folder, dtype, CPU), PROMPTS, LIMITS).answers
        for dtype in DTYPES
    }
    for shares, dtype, size in combinations(SHARES, DTYPES, (None, 2)):
        found = block(dtype, micro_batch_size=size, **shares).run_batch(PROMPTS, LIMITS)
        assert found.answers == wanted[dtype], (shares, dtype, size)


@pytest.mark.equality
def test_a_narrow_cache_off_the_device_writes_what_a_narrow_one_there_writes(folder, block):
    for kind in ("int4", "int2"):
        model = load_folder(folder, "fp32", CPU)
        wanted = run_batch(model, PROMPTS, LIMITS, BatchSetup(kind)).answers
        found = block(kv_cache=kind, **SPREAD).run_batch(PROMPTS, LIMITS)
        assert found.answers == wanted, kind
        assert found.answers != run_batch(model, PROMPTS, LIMITS).answers, kind


@pytest.mark.equality
def test_four_bit_weights_elsewhere_write_what_four_bit_weights_here_write(block):
    for dtype in sorted(DTYPES):
        here = block(dtype, "int4", is_narrow=True).run_batch(PROMPTS, LIMITS)
        away = block(dtype, "int4", is_narrow=True, micro_batch_size=2, **SPREAD)
        assert away.run_batch(PROMPTS, LIMITS).answers == here.answers, dtype
        assert here.answers != block(dtype).run_batch(PROMPTS, LIMITS).answers, dtype


def test_four_bit_weights_are_the_nearest_of_sixteen_steps_of_their_group():
    odd = {"weight": torch.ones(2, 65)}
    assert pack_layer(odd, 64) == odd

    torch.manual_seed(1)
    matrix, norm = torch.randn(8, 128), torch.randn(128)
    parts = pack_layer({"up.weight": matrix, "norm.weight": norm}, 64)
    found = unpack_layer(parts, torch.float32)
    groups = matrix.unflatten(-1, (-1, 64))
    steps = (groups.amax(-1) - groups.amin(-1)) / 15
    errors = (found["up.weight"] - matrix).abs().unflatten(-1, (-1, 64)).amax(-1)
    assert bool((errors <= 0.51 * steps + 2e-3).all())
    assert torch.equal(found["norm.weight"], norm)
    assert parts["up.weight.numbers"].nbytes == matrix.numel() / 2
    assert set(PackedTensor._fields) == {name.rpartition(".")[2] for name in parts if "up" in name}


@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=60),
    parts=st.tuples(*[st.floats(0.01, 1.0)] * 3),
)
def test_each_place_has_its_share_within_the_largest_piece(sizes, parts):
    shares = [part / sum(parts) for part in parts]
    places = interleaved_places(sizes, shares[1], shares[2])
    for place, share in zip(PLACES, shares, strict=True):
        here = sum(size for size, at in zip(sizes, places, strict=True) if at == place)
        assert abs(here - share * sum(sizes)) <= max(sizes) * (1 + 1e-9)


def test_bytes_lie_where_the_policy_has_them_within_a_layer(block):
    for is_narrow in (False, True):
        policy = block(is_narrow=is_narrow, micro_batch_size=2, activations_cpu=0.5, **SPREAD)
        policy.run_batch(PROMPTS, LIMITS)

        measured = policy.figures.result_metrics()

        layer = 1 / LAYERS
        assert {name: measured[name] for name in SPREAD} == pytest.approx(SPREAD, abs=layer), (
            is_narrow
        )
        assert 0.2 < measured["activations_cpu"] < 0.8, is_narrow
        held = policy.figures
        assert measured["host_bytes"] == sum(
            each.most["host_memory"] for each in (held.weights, held.cache, held.activations)
        ), is_narrow
        tokens = sum(max(map(len, rows)) * len(rows) for rows in (PROMPTS[:2], PROMPTS[2:4]))
        tokens += len(PROMPTS[4]) + len(PROMPTS) * (LIMITS.output_tokens - 1)
        per_token = 2 * 2 * 16 * 4  # K and V of two heads of 16, in fp32
        assert held.cache.most.total() == LAYERS * tokens * per_token, is_narrow


@pytest.mark.proven
def test_each_layer_comes_once_a_pass_however_many_micro_batches_it_serves(block):
    for size in (None, 1, 2):
        policy = block(micro_batch_size=size, weights_disk=0.5)
        policy.run_batch(PROMPTS, LIMITS)
        away = [at for at, place in enumerate(policy.layers.places) if place == "disk"]
        assert len(away) == LAYERS / 2, size
        assert policy.figures.passes == LIMITS.output_tokens, size
        assert policy.figures.loads == dict.fromkeys(away, LIMITS.output_tokens), size


def test_between_passes_only_what_stays_is_on_the_device(folder, block):
    policy = block(weights_disk=0.5)
    policy.run_batch(PROMPTS, AnswerLimits(2))
    whole = load_folder(folder, "fp32", CPU)
    layer = sum(each.nbytes for each in whole.model.layers[0].parameters())
    assert held_bytes(policy.model) == held_bytes(whole) - LAYERS / 2 * layer


def test_prompts_that_are_answered_leave_the_passes_of_the_others(folder, block):
    first = run_batch(load_folder(folder, "fp32", CPU), PROMPTS, AnswerLimits(1)).answers
    ends = frozenset(answer.ids[0] for answer in first[:2])
    policy = block(micro_batch_size=2, weights_disk=1.0)
    found = policy.run_batch(PROMPTS, AnswerLimits(4, ends))
    assert [each.finish_reason for each in found.answers[:2]] == ["stop", "stop"]
    assert found.answers[2].ids[0] == first[2].ids[0]


def test_a_stop_keeps_nothing_of_the_block_and_its_cache_on_disk_goes_with_it(block, tmp_path):
    with pytest.raises(StopRequestedError):
        block(kv_disk=1.0).run_batch(PROMPTS, AnswerLimits(4, should_stop=lambda: True))
    block(kv_disk=1.0).run_batch(PROMPTS, LIMITS)
    assert [name for _, _, names in os.walk(tmp_path) for name in names] == []


def test_a_disk_that_loses_a_cache_ends_the_job(tmp_path):
    with ThreadPoolExecutor(1) as thread:
        store = DiskStore(tmp_path, 8, thread, PolicyFigures())
        store.add((torch.ones(4, 1, 2, 3),))
        thread.submit(lambda: os.truncate(store.file, 10)).result()
        with pytest.raises(OSError, match="the cache's file ends 86 bytes early"):
            store.all_with((torch.ones(1, 1, 2, 3),))


def test_what_no_policy_runs_with_is_refused_by_name(tmp_path):
    for changes, told in (
        ({"batching": "packed"}, "batching packed"),
        ({"batching": "turbo"}, "batching turbo"),
        ({"weight_dtype": "int8"}, "weight_dtype int8"),
        ({"kv_cache": "fp8"}, "kv_cache fp8"),
        ({"speculation": {"method": "lookup"}}, "speculation lookup"),
        ({"compiled_step": True}, "offload policy"),
        ({"split": {"method": "tensor"}}, "offload policy"),
        (
            {"batch_size": 2},
            "micro_batch_size is 4, above batch_size, which is 2; choose at most 2",
        ),
    ):
        policy = PolicyOffload(kv_cpu=0.5, micro_batch_size=4)
        with refused(ValidationError, told, (changes, told)):
            GenerateSpec.model_validate({"model": DemoModel(), "offload": policy, **changes})

    for kind in ("weights", "kv"):
        shares = {f"{kind}_cpu": 0.7, f"{kind}_disk": 0.4}
        with refused(ValidationError, f"{kind}_cpu and {kind}_disk add up to 1.1", kind):
            PolicyOffload(**shares)

    config = {**TINY_CONFIG, "model_type": "mistral", "sliding_window": 8}
    fresh_model(config, torch.float32).save_pretrained(str(tmp_path / "model"))
    skeleton = LayerwiseModel(tmp_path / "model", CPU, torch.float32)
    with pytest.raises(BadInputError, match="kv_cpu and kv_disk need full attention in every"):
        ZigZag(skeleton, tmp_path / "model", PolicyOffload(kv_cpu=0.5), tmp_path)


# The bench of a policy asks the planner, gives both ways one cap, and compares like with like.

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


def test_the_planner_puts_on_disk_what_the_cap_does_not_hold_and_tells_what_nothing_fits():
    request = question(Effort(), dict(MACHINE))
    policy = policy_of(request)
    assert policy.weights_disk + policy.kv_disk > 0
    assert policy.weights_cpu + policy.kv_cpu < 0.001  # there is no memory beside the cap
    assert Effort().num_prompts % policy.micro_batch_size == 0
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


def test_neither_the_first_round_nor_ways_of_different_text_are_counted(way_of):
    effort = replace(TINY, num_prompts=2, rounds=2)
    theirs = way_of(*(answered(each, "a", "b") for each in (50.0, 8.0, 2.0)))
    ours = way_of(*(answered(each, "a", "b") for each in (0.1, 2.0, 2.0)))
    found, read = in_turns([theirs, ours], effort)
    assert (found.value, found.n, found.of) == (pytest.approx(2.0), 2, "seconds")
    assert (read.value, read.n, read.of) == (pytest.approx(1.0), 2, "bytes read from disk")

    effort = replace(TINY, num_prompts=2, rounds=1)
    theirs, ours = way_of(answered(1.0, "a", "b")), way_of(answered(1.0, "a", "c"))
    with pytest.raises(RuntimeError, match="only 50% of the answers are the same"):
        next(in_turns([theirs, ours], effort))


def test_bytes_are_those_that_each_round_read_more_or_are_not_compared(way_of):
    effort = replace(TINY, num_prompts=1, rounds=2)
    theirs = way_of(*(answered(1.0, "a", read_bytes=each) for each in (900, 1300, 1700)))
    ours = way_of(*(answered(1.0, "a", read_bytes=each) for each in (500, 600, 700)))
    _seconds, read = in_turns([theirs, ours], effort)
    assert read.value == pytest.approx(4.0)

    effort = replace(TINY, num_prompts=1, rounds=1)
    theirs = way_of(*(answered(1.0, "a", read_bytes=500) for _ in range(2)))
    (found,) = in_turns([theirs, way_of(answered(1.0, "a"), answered(1.0, "a"))], effort)
    assert found.of == "seconds"


def test_a_way_that_dies_or_takes_longer_than_it_may_is_told(way_of, running):
    with pytest.raises(BenchProcessError, match="a benchmark case ended with 0"):
        way_of().run()

    way = running("raise SystemExit(5)")
    with pytest.raises(BenchProcessError):
        way.receive()
    with pytest.raises(BenchProcessError, match="a benchmark case ended with 5"):
        way.run()

    way = running("import sys, time; sys.stdin.readline(); time.sleep(600)")
    with pytest.raises(BenchProcessError, match=r"ended with -9 .*or it took too long"):
        way.run(timeout_seconds=0.2)


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
    monkeypatch.setattr(offload_bench, "start_capped_case", tried)
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
    monkeypatch.setattr(offload_bench, "start_capped_case", tried)

    found = best_batch(effort, question(effort, dict(MACHINE)), order)

    assert found["memory_bytes"] <= 120 * MB
    wholes = [each for each in tried.orders if each.num_prompts > each.batch_size]
    assert len(wholes) > 1
    assert [each.memory_bytes > 120 * MB for each in wholes] == [True] * (len(wholes) - 1) + [
        False
    ]


def test_a_cap_under_which_every_map_is_killed_is_told(monkeypatch, orders, way_of):
    effort = Effort()
    monkeypatch.setattr(
        offload_bench, "start_capped_case", Tried(way_of, 0, dict.fromkeys(SECONDS, 1.0))
    )
    with pytest.raises(RuntimeError, match="map answers nothing in 720000000 bytes; raise cap"):
        best_batch(effort, question(effort, dict(MACHINE)), orders[1])
