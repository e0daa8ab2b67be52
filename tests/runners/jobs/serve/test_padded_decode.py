"""Padded decode steps give the tokens of eager ones, whoever comes, ends and makes room."""

import pytest
import torch

from runners.jobs.loading import fresh_model, ready
from runners.jobs.serve.contract import Limits, Sampling
from runners.jobs.serve.engine import Engine, Reply
from runners.jobs.serve.figures import Figures
from runners.jobs.serve.padded_decode import (
    CaptureError,
    GraphPool,
    PaddedDecode,
    Shape,
    doubling,
    prepared_decode,
)
from runners.jobs.serve.paging import PAGE_TOKENS, PagedCache, Row, check_paging
from runners.jobs.serve.sampling import Sampler
from runners.jobs.serve.text import Answer
from tests.runners.jobs.tiny import TINY_CONFIG

VOCABULARY = TINY_CONFIG["vocab_size"]
LIMITS = Limits(5, 32, 64, frozenset({7}))
GREEDY = {"temperature": 0.0}
SAMPLED = (
    GREEDY,
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.2, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 0.9, "repetition_penalty": 1.3},
    {"temperature": 1.0, "top_logprobs": 3},
)


class Numbers:
    """A tokenizer that writes a token as its number."""

    def decode(self, ids, **_options):
        return "".join(f"{each} " for each in ids)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    made = ready(fresh_model(TINY_CONFIG, torch.float32))
    check_paging(made, PagedCache(8), VOCABULARY)
    return made


@pytest.fixture
def engine_of(model):
    def make(num_pages: int, *, is_padded: bool) -> Engine:
        cache = PagedCache(num_pages)
        decode = PaddedDecode(model, cache, LIMITS) if is_padded else None
        return Engine(model, cache, LIMITS, Figures(), decode=decode)

    return make


def replies_of(wishes) -> list[Reply]:
    """Return one request per wish; prompts and answers differ in length."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for at, wish in enumerate(wishes):
        prompt = torch.randint(VOCABULARY, (3 + 5 * (at % 4),), generator=generator).tolist()
        sampling = Sampling(34 - 3 * (at % 5), seed=at, **wish)
        made.append(Reply(prompt, sampling, Answer(Numbers()), lambda _chunk: None))
    return made


def tokens_of(engine: Engine, wishes) -> tuple[list[list[int]], int]:
    """Let requests arrive one by one and cancel some of them.

    Returns the tokens of each, and after how many steps one waited that had been preempted.
    """
    replies, preempted = replies_of(wishes), 0
    for at, reply in enumerate(replies):
        engine.submit([reply])
        engine._step()
        engine._step()
        if at % 5 == 3:
            engine.cancel([replies[at - 1]])
    while not engine.is_idle:
        engine._step()
        preempted += any(each.num_written for each in engine._waiting)
    assert engine.cache.used_ratio == 0.0
    return [each.tokens for each in replies], preempted


@pytest.mark.equality
@pytest.mark.parametrize(
    ("wishes", "num_pages", "has_preemption"),
    [
        ((GREEDY,) * 8, 8, True),
        (SAMPLED[:2] * 4, 32, False),
        (SAMPLED[:4] * 2, 8, True),
        (SAMPLED + SAMPLED[:4], 32, False),
    ],
)
def test_tokens_are_those_of_eager_steps(
    engine_of, monkeypatch, wishes, num_pages, has_preemption
):
    wanted, preempted = tokens_of(engine_of(num_pages, is_padded=False), wishes)
    padded, steps = engine_of(num_pages, is_padded=True), []
    step = padded.decode.step
    monkeypatch.setattr(
        padded.decode, "step", lambda *given: steps.append(step(*given)) or steps[-1]
    )

    assert tokens_of(padded, wishes) == (wanted, preempted)
    assert (preempted > 0) == has_preemption
    assert len(steps) > 40
    assert None not in steps


def rows_of(cache: PagedCache, starts) -> list[Row]:
    """Return one decode row per start, each with pages of its own."""
    return [Row([5 + at], at, cache.take(at // PAGE_TOKENS + 1)) for at in starts]


@torch.inference_mode()
def test_padding_writes_to_the_scratch_page_alone(model):
    cache = PagedCache(16)
    decode = PaddedDecode(model, cache, LIMITS)
    rows = rows_of(cache, (3, 20, 33, 5))
    samplers = [Sampler(Sampling(1, **GREEDY)) for _ in rows]
    decode.step(rows, samplers)
    pools = [pool for pair in cache._layers.values() for pool in pair]
    for pool in pools:
        pool[rows[3].slots(0)] = 0.0  # it ended, and others have its page
    before = [pool.clone() for pool in pools]
    three = [Row([9], row.start + 1, row.pages) for row in rows[:3]]  # a step of four again

    decode.step(three, samplers[:3])

    live = torch.cat([row.slots(row.start) for row in three])
    scratch = torch.arange(PAGE_TOKENS) + cache.scratch_page * PAGE_TOKENS
    for pool, old in zip(pools, before, strict=True):
        changed = (pool != old).flatten(1).any(dim=1).nonzero()[:, 0]
        assert set(live.tolist()) <= set(changed.tolist())
        assert set(changed.tolist()) <= {*live.tolist(), *scratch.tolist()}


def test_what_a_graph_holds_reads_nothing_on_the_host(monkeypatch, model):
    """The meta device has no values, and no operation mixes it with another device."""
    monkeypatch.setattr("transformers.utils.import_utils.is_cuda_stream_capturing", lambda: True)
    captured = []
    monkeypatch.setattr(
        GraphPool, "capture", lambda _self, key, function: captured.append(key) or function()
    )
    with torch.device("meta"):
        on_meta = fresh_model(TINY_CONFIG, torch.bfloat16)
    on_meta.set_attn_implementation(model.config._attn_implementation)

    PaddedDecode(on_meta, PagedCache(64), LIMITS).prepare()

    sizes = (5, 4, 2, 1)
    assert captured == [
        key for rows in sizes for key in (Shape(rows, 4), (rows, "drawn"), (rows, "filtered"))
    ]


@pytest.mark.parametrize(
    ("failing", "wishes"),
    [
        (Shape(4, 4), SAMPLED[:4] * 2),
        ((4, "drawn"), SAMPLED[:2] * 4),
        ((4, "filtered"), SAMPLED[:4] * 2),
    ],
)
def test_a_shape_that_cannot_be_captured_is_logged_once_and_served_eagerly(
    engine_of, monkeypatch, failing, wishes
):
    wanted = tokens_of(engine_of(32, is_padded=False), wishes)
    padded, lines = engine_of(32, is_padded=True), []
    padded.decode.log = lines.append

    def capture(_self, key, _function):
        if key == failing:
            raise CaptureError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def run(self, key, function):
        capture(self, key, function)
        function()

    monkeypatch.setattr(GraphPool, "capture", capture)
    monkeypatch.setattr(GraphPool, "run", run)

    assert tokens_of(padded, wishes) == wanted
    assert padded.decode is None
    (line,) = lines
    assert line.endswith("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_buffers_that_do_not_fit_leave_an_endpoint_eager(model, monkeypatch):
    def full(*_args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB\nMore")

    monkeypatch.setattr(PaddedDecode, "prepare", full)
    lines = []

    assert prepared_decode(model, PagedCache(8), LIMITS, lines.append) is None
    assert len(lines) == 1
    assert lines[0].endswith("Tried to allocate 9.00 GiB")


@pytest.mark.parametrize(
    ("lengths", "shape"),
    [
        ([1], Shape(1, 16)),
        ([256, 3, 7], Shape(4, 16)),
        ([257] * 4, Shape(4, 32)),
        ([900] * 6, Shape(6, 60)),
        ([3] * 7, None),  # more than may run
        ([961], None),  # longer than a sequence may be
        ([960] + [3] * 5, Shape(6, 60)),
    ],
)
def test_a_step_has_the_smallest_shape_that_holds_it(model, lengths, shape):
    decode = PaddedDecode(model, PagedCache(90), Limits(6, 1, 960, frozenset()))

    assert decode.shape_of([Row([1], each - 1, []) for each in lengths]) == shape


def test_a_long_sequence_among_many_short_ones_is_not_padded(model):
    decode = PaddedDecode(model, PagedCache(64), Limits(32, 1, 960, frozenset()))
    rows = [Row([1], 959, []), *[Row([1], 3, [])] * 15]

    assert decode.shape_of(rows[:4]) == Shape(4, 60)
    assert decode.shape_of(rows) is None


@pytest.mark.parametrize(("most", "sizes"), [(1, (1,)), (8, (1, 2, 4, 8)), (6, (1, 2, 4, 6))])
def test_sizes_double_up_to_the_most(most, sizes):
    assert doubling(1, most) == sizes
