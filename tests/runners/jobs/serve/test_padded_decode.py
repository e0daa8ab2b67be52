"""Tokens of an endpoint: padded steps, captured functions, draws, adapters in one batch."""

import contextlib
import sys

import pytest
import torch
from scipy.stats import chisquare

from runners.jobs.adapters import MixedAdapters
from runners.jobs.loading import demo_config, fresh_model, ready, use_attn_implementation
from runners.jobs.serve import bench, padded_decode
from runners.jobs.serve.contract import Limits, Sampling
from runners.jobs.serve.engine import AnswerSequence, EndpointMetrics, Engine
from runners.jobs.serve.fused import fuse_kernels
from runners.jobs.serve.padded_decode import (
    CaptureError,
    GraphPool,
    PaddedDecode,
    Sampler,
    StepShape,
    choose,
    doubling,
    prepared_decode,
)
from runners.jobs.serve.paging import PAGE_TOKENS, PagedCache, TokenRow, check_paging
from runners.jobs.serve.text import IncrementalDetokenizer
from tests.runners.jobs.tiny import TINY, TINY_CONFIG

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
        return Engine(model, cache, LIMITS, EndpointMetrics(), decode=decode)

    return make


def replies_of(wishes) -> list[AnswerSequence]:
    """Return one request per wish; prompts and answers differ in length."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for at, wish in enumerate(wishes):
        prompt = torch.randint(VOCABULARY, (3 + 5 * (at % 4),), generator=generator).tolist()
        sampling = Sampling(34 - 3 * (at % 5), seed=at, **wish)
        made.append(
            AnswerSequence(
                prompt, sampling, IncrementalDetokenizer(Numbers()), lambda _chunk: None
            )
        )
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


def noted_steps(decode, monkeypatch):
    """Return what will hold the choices of each step."""
    steps, step = [], decode.step
    monkeypatch.setattr(decode, "step", lambda *given: steps.append(step(*given)) or steps[-1])
    return steps


@pytest.mark.equality
def test_tokens_are_those_of_eager_steps(engine_of, monkeypatch):
    for wishes, num_pages, has_preemption in (
        ((GREEDY,) * 8, 8, True),
        (SAMPLED[:2] * 4, 32, False),
        (SAMPLED[:4] * 2, 8, True),
        (SAMPLED + SAMPLED[:4], 32, False),
    ):
        wanted, preempted = tokens_of(engine_of(num_pages, is_padded=False), wishes)
        padded = engine_of(num_pages, is_padded=True)
        steps = noted_steps(padded.decode, monkeypatch)

        assert tokens_of(padded, wishes) == (wanted, preempted), wishes
        assert (preempted > 0) == has_preemption, wishes
        assert len(steps) > 40, wishes
        assert None not in steps, wishes


def rows_of(cache: PagedCache, starts) -> list[TokenRow]:
    """Return one decode row per start, each with pages of its own."""
    return [TokenRow([5 + at], at, cache.allocate(at // PAGE_TOKENS + 1)) for at in starts]


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
    three = [TokenRow([9], row.start + 1, row.pages) for row in rows[:3]]  # a step of four again

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
        key for rows in sizes for key in (StepShape(rows, 4), (rows, "drawn"), (rows, "filtered"))
    ]


@pytest.mark.parametrize(
    ("failing", "wishes"),
    [
        (StepShape(4, 4), SAMPLED[:4] * 2),
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


@pytest.mark.slow
def test_compiled_norms_and_rotary_embeddings_leave_the_logits_and_can_be_undone(model):
    ids = torch.arange(12)[None]
    source = sys.modules[type(model).__module__]
    before = source.apply_rotary_pos_emb
    with torch.inference_mode():
        plain = ordinary(model, ids)
        undo = fuse_kernels(model)
        try:
            fused = ordinary(model, ids)
            norms = [each for each in model.modules() if each._compiled_call_impl is not None]
            assert {type(each).__name__ for each in norms} == {"LlamaRMSNorm"}
            assert source.apply_rotary_pos_emb is not before
        finally:
            undo()
        assert source.apply_rotary_pos_emb is before
        assert not any(each._compiled_call_impl for each in model.modules())
        assert ordinary(model, ids).equal(plain)
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)


def test_an_endpoint_whose_kernels_do_not_compile_has_its_graphs_without(model, monkeypatch):
    captured, undone, lines = [], [], []
    monkeypatch.setattr(padded_decode, "fuse_kernels", lambda _model: lambda: undone.append(1))

    def capture(_self, key, _function):
        if not undone:
            raise CaptureError("no Triton")
        captured.append(key)

    monkeypatch.setattr(GraphPool, "capture", capture)
    assert prepared_decode(model, PagedCache(8), LIMITS, lines.append, fuses=True) is not None
    assert len(captured) == 12
    assert lines[0] == "norms and rotary embeddings are not compiled: no Triton"
    undone.append(1)
    monkeypatch.setattr(
        GraphPool, "capture", lambda *_args: (_ for _ in ()).throw(CaptureError("x"))
    )
    assert prepared_decode(model, PagedCache(8), LIMITS, lines.append) is None


def ordinary(model, ids):
    """Return the logits of a model with transformers' own attention."""
    with use_attn_implementation(model, "sdpa"):
        return model(input_ids=ids, use_cache=False).logits


def test_a_step_has_the_smallest_shape_that_holds_it_of_doubling_sizes(model):
    for lengths, shape in (
        ([1], StepShape(1, 16)),
        ([256, 3, 7], StepShape(4, 16)),
        ([257] * 4, StepShape(4, 32)),
        ([900] * 6, StepShape(6, 60)),
        ([3] * 7, None),  # more than may run
        ([961], None),  # longer than a sequence may be
        ([960] + [3] * 5, StepShape(6, 60)),
    ):
        decode = PaddedDecode(model, PagedCache(90), Limits(6, 1, 960, frozenset()))
        assert decode.shape_of([TokenRow([1], each - 1, []) for each in lengths]) == shape, lengths
    decode = PaddedDecode(model, PagedCache(64), Limits(32, 1, 960, frozenset()))
    rows = [TokenRow([1], 959, []), *[TokenRow([1], 3, [])] * 15]
    assert decode.shape_of(rows[:4]) == StepShape(4, 60)
    assert decode.shape_of(rows) is None

    for most, sizes in ((1, (1,)), (8, (1, 2, 4, 8)), (6, (1, 2, 4, 6))):
        assert doubling(1, most) == sizes, (most, sizes)


# A function is captured once and then replayed; a failed capture names its own cause.

GPU = torch.device("cuda")


class Stream:
    def wait_stream(self, _other):
        return None


@pytest.fixture
def seen(monkeypatch):
    """Replace what torch asks of a driver; return what was captured, replayed and set."""
    calls = []

    class Graph:
        def pool(self):
            return (0, 7)

        def replay(self):
            calls.append("replay")

    @contextlib.contextmanager
    def capture(_graph, pool, stream, capture_error_mode):
        calls.append(("capture", pool))
        try:
            yield
        except RuntimeError:  # as torch's own: the end of the capture raises as well
            raise RuntimeError("operation failed due to a previous error") from None

    current, sizes = Stream(), iter((100, 130, 130, 170))
    replaced = {
        "Stream": lambda _device: Stream(),
        "current_stream": lambda _device: current,
        "set_stream": lambda stream: calls.append(stream is current),
        "stream": lambda _stream: contextlib.nullcontext(),
        "synchronize": lambda _device: None,
        "empty_cache": lambda: None,
        "memory_reserved": lambda _device: next(sizes),
        "CUDAGraph": Graph,
        "graph": capture,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return calls


@pytest.mark.parametrize("failing_run", [1, 2])
def test_a_failed_capture_names_the_cause_and_leaves_the_current_stream(seen, failing_run):
    runs = []

    def full():
        runs.append(1)
        if len(runs) == failing_run:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried 2 GiB")

    pool = GraphPool(GPU)
    with pytest.raises(CaptureError, match=r"^CUDA out of memory\.$"):
        pool.run("a", full)

    assert len(pool) == 0
    assert seen == ([] if failing_run == 1 else [("capture", None), True])


def test_a_function_is_captured_once_in_the_pool_of_the_first_unless_on_a_cpu(seen):
    pool, runs = GraphPool(torch.device("cpu")), []
    pool.capture("a", lambda: runs.append("captured"))
    pool.run("a", lambda: runs.append("called"))
    assert (runs, seen) == (["called"], [])

    pool, runs = GraphPool(GPU), []
    for key in ("a", "b", "a"):
        pool.run(key, lambda: runs.append(1))
    assert seen == [("capture", None), "replay", ("capture", (0, 7)), "replay", "replay"]
    assert len(runs) == 4  # once before each capture, once in it
    assert (len(pool), pool.bytes) == (2, 70)


# Tokens are drawn as the parameters say, for all rows at once, and for each row as if alone.

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -3.0])
NUM_DRAWS, BATCH = 4000, 200


def expected(wish: Sampling, counts: dict[int, int]) -> torch.Tensor:
    """Return the probabilities by the definition, one token after the other."""
    logits = LOGITS.double().clone()
    for token, bias in wish.logit_bias:
        logits[token] += bias
    for token, count in counts.items():
        factor = wish.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        logits[token] -= wish.frequency_penalty * count + wish.presence_penalty * (count > 0)
    shares = torch.softmax(logits / wish.temperature, dim=-1)
    shares[shares < wish.min_p * shares.max()] = 0.0
    if wish.top_k:
        shares[shares.argsort(descending=True)[wish.top_k :]] = 0.0
    shares /= shares.sum()
    before = 0.0
    for token in shares.argsort(descending=True).tolist():
        own = float(shares[token])
        shares[token] = own if before < wish.top_p else 0.0
        before += own
    return shares / shares.sum()


def test_draws_follow_the_distribution(monkeypatch):
    for changes in (
        {},
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_p": 0.75},
        {"min_p": 0.2},
        {"top_k": 5, "top_p": 0.8, "min_p": 0.05, "temperature": 1.3},
        {"repetition_penalty": 1.5, "top_p": 0.95},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"logit_bias": ((3, 1.5), (0, -100.0))},
        {"logit_bias": ((7, 4.0), (2, -1.0)), "repetition_penalty": 1.5},
    ):
        for candidates in (2, 1024):
            monkeypatch.setattr(padded_decode, "CANDIDATES", candidates)
            wish = Sampling(1, seed=11, **changes)
            sampler = Sampler(wish, prompt=[0, 7])
            sampler.add(1)
            sampler.add(1)
            counts = dict(sampler.counts())
            monkeypatch.setattr(sampler, "add", lambda _token: None)

            rows, samplers = LOGITS.expand(BATCH, -1), [sampler] * BATCH
            drawn = [
                each.token for _ in range(NUM_DRAWS // BATCH) for each in choose(rows, samplers)
            ]

            shares = expected(wish, counts)
            found = torch.bincount(torch.tensor(drawn), minlength=len(LOGITS))
            assert not found[shares == 0].any(), (changes, candidates)
            is_possible = shares > 0
            likelihood = chisquare(found[is_possible], shares[is_possible] * NUM_DRAWS).pvalue
            assert likelihood > 0.001, (changes, candidates)


def test_odd_parameters_of_one_request_change_no_token_of_its_neighbours():
    plain = [Sampler(Sampling(1, seed=seed), prompt=[0, 7]) for seed in range(4)]
    alone = [each.token for each in choose(LOGITS.expand(4, -1), plain)]
    for odd in (
        {"temperature": 1e-300}, {"temperature": 5e-324}, {"top_p": 5e-324}, {"top_k": 10**30},
        {"min_p": 1.0}, {"seed": 2**63 - 1}, {"repetition_penalty": 1e-320},
        {"repetition_penalty": 1e-30}, {"logit_bias": tuple((at, -100.0) for at in range(8))},
    ):  # fmt: skip
        strange = Sampler(Sampling(1, **{"seed": 5, **odd}), prompt=[0, 7])
        beside = [Sampler(Sampling(1, seed=seed), prompt=[0, 7]) for seed in range(4)]
        first, *found = choose(LOGITS.expand(5, -1), [strange, *beside])
        assert [each.token for each in found] == alone, odd
        assert first.token in range(len(LOGITS)), odd
    # Logits of a model that overflowed: any token, but one of the vocabulary.
    (lost,) = choose(torch.full((1, len(LOGITS)), torch.nan), plain[:1])
    assert lost.token in range(len(LOGITS))


WISHES = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1e-50},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 2.0, "top_k": 50, "top_logprobs": 3},
    {"temperature": 1.0, "min_p": 0.1, "top_logprobs": 0},
    {"temperature": 1.5, "top_p": 0.999, "presence_penalty": 0.5},
]


@pytest.mark.equality
def test_an_answer_is_the_same_whoever_is_beside_it():
    torch.manual_seed(5)
    steps = torch.randn(6, len(WISHES), 5000).bfloat16().float()  # with ties, as real logits

    def answers(rows: list[int]) -> list[list[object]]:
        samplers = [Sampler(Sampling(9, seed=row, **WISHES[row]), [1, 2]) for row in rows]
        return [choose(logits[rows], samplers) for logits in steps]

    together = answers(list(range(len(WISHES))))
    for row in range(len(WISHES)):
        assert [each[row] for each in together] == [each[0] for each in answers([row])]
    greedy = steps.argmax(dim=-1)
    for row in (0, 2):
        assert [each[row].token for each in together] == greedy[:, row].tolist()


def test_logprobs_are_the_models_own_and_only_for_those_who_ask():
    logits = LOGITS.repeat(2, 1)
    wishes = [Sampling(1, temperature=0.0), Sampling(1, temperature=0.0, top_logprobs=2, top_k=1)]
    without, asked = choose(logits, [Sampler(each) for each in wishes])
    logprobs = torch.log_softmax(LOGITS, dim=-1).tolist()
    assert (without.token, without.logprob, without.top) == (0, None, ())
    assert asked.logprob == pytest.approx(logprobs[0])
    assert [token for token, _ in asked.top] == [0, 1]
    assert [value for _, value in asked.top] == pytest.approx(logprobs[:2])


# The bench of adapters: in one batch each prompt is answered as it is alone, in fewer passes.

PROMPTS = [[1, 2, 3], [1, 2, 3], [4, 5, 6]]


@pytest.fixture
def paged():
    torch.manual_seed(1)
    model = ready(fresh_model(demo_config(TINY), torch.float32))
    adapters = MixedAdapters(model, [bench._adapter(model, str(at)) for at in range(3)])
    check_paging(model, cache := PagedCache(8), TINY.vocab_size)
    return bench.PagedDecoder(model, cache, adapters, 6)


@pytest.mark.equality
def test_adapters_in_one_batch_take_the_passes_of_one_of_them(paged, monkeypatch):
    alone = [paged.write([each], [at])[0] for at, each in enumerate(PROMPTS)]
    assert paged.write(PROMPTS, range(3)) == alone
    passes, real = [], bench.forward
    monkeypatch.setattr(bench, "forward", lambda *a: (passes.append(1), real(*a))[1])
    paged.write(PROMPTS, range(3))
    assert len(passes) == 6


def test_every_ratio_is_taken_and_named():
    effort = bench.Effort(rounds=1, num_adapters=2, prompt_tokens=4, output_tokens=2)
    assert [each.name for each in bench.ratios(effort, TINY)] == [
        "adapters in turn within a batch / side by side",
        "adapters one by one / in one batch",
    ]
