"""The engine alone: pages, places, who must wait, who makes room, what a fault does."""

import threading

import pytest
import torch

from runners.jobs.loading import load_folder, load_tokenizer
from runners.jobs.runtime import BadInputError
from runners.jobs.serve.contract import EngineEndedError, Limits, QueueFullError
from runners.jobs.serve.engine import AnswerSequence, EndpointMetrics, Engine
from runners.jobs.serve.padded_decode import Sampling
from runners.jobs.serve.paging import PAGE_TOKENS, PagedCache, check_paging, pages_for
from runners.jobs.serve.text import RequestTokenizer


@pytest.fixture(scope="module")
def loaded(host, trained_model):
    folder = host.path / "attempts" / trained_model.attempt_id / "output" / "model"
    model = load_folder(folder, "fp32", torch.device("cpu"))
    check_paging(model, PagedCache(8), 512)
    return model, RequestTokenizer(load_tokenizer(folder))


@pytest.fixture
def make_engine(loaded):
    def make(num_pages: int = 16, **limits) -> Engine:
        fields = {"max_concurrency": 4, "queue_limit": 8, "max_length": 64, "end_ids": frozenset()}
        return Engine(
            loaded[0], PagedCache(num_pages), Limits(**{**fields, **limits}), EndpointMetrics()
        )

    return make


def reply(loaded, text: str, tokens: int, pieces: list, **sampling) -> AnswerSequence:
    wish = Sampling(tokens, **{"temperature": 0.0, **sampling})
    reader = loaded[1]
    return AnswerSequence(reader.prompt_ids(text), wish, reader.answer(wish.stops), pieces.append)


def texts_of(engine: Engine, loaded, prompts, tokens=30, **sampling) -> list[str]:
    """Let the engine write an answer for each prompt, all at once."""
    pieces = [[] for _ in prompts]
    replies = [
        reply(loaded, text, tokens, own, **sampling)
        for text, own in zip(prompts, pieces, strict=True)
    ]
    engine.submit(replies)
    while not engine.is_idle:
        engine._step()
    return ["".join(piece.text for piece in own) for own in pieces]


PROMPTS = ["import os", "def f(", "class A:", "return", "x = ["]


@pytest.mark.equality
@pytest.mark.parametrize(
    "sampled",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.2},
    ],
)
def test_whoever_makes_room_for_others_still_writes_the_same(make_engine, loaded, sampled):
    wish = {**sampled, "seed": 3}
    alone = [texts_of(make_engine(), loaded, [each], **wish)[0] for each in PROMPTS]
    tight = make_engine(num_pages=5, max_concurrency=5)

    together = texts_of(tight, loaded, PROMPTS, **wish)

    assert together == alone
    assert tight.cache.used_ratio == 0.0


@pytest.mark.equality
def test_a_long_prompt_is_read_in_pieces_beside_what_decodes(make_engine, loaded):
    whole = texts_of(make_engine(), loaded, ["import os\n" * 6, "def f("])

    pieces = make_engine(step_tokens=7)

    assert texts_of(pieces, loaded, ["import os\n" * 6, "def f("]) == whole


def test_more_than_may_wait_are_refused(make_engine, loaded):
    engine = make_engine(max_concurrency=1, queue_limit=1)
    engine.submit([reply(loaded, "a", 4, []) for _ in range(2)])

    with pytest.raises(QueueFullError):
        engine.submit([reply(loaded, "a", 4, [])])


def test_a_cancelled_answer_gives_its_pages_back(make_engine, loaded):
    engine, pieces = make_engine(), []
    mine = reply(loaded, "import", 40, pieces)
    engine.submit([mine])
    engine._step()
    assert engine.cache.used_ratio > 0

    engine.cancel([mine])
    engine._step()

    assert engine.is_idle
    assert engine.cache.used_ratio == 0.0


def test_a_fault_in_a_pass_ends_every_open_answer_and_takes_no_new_one(make_engine, loaded):
    engine, pieces = make_engine(max_concurrency=1), []
    engine.submit([reply(loaded, "import", 8, pieces), reply(loaded, "wait", 8, pieces)])
    engine.cache.write = None  # the next pass cannot keep its keys
    faults = []

    def run() -> None:
        try:
            engine.run()
        except TypeError as error:
            faults.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)

    assert len(faults) == 1
    assert [piece.finish_reason for piece in pieces] == ["error", "error"]
    with pytest.raises(EngineEndedError):
        engine.submit([reply(loaded, "late", 8, [])])


def test_a_model_that_reads_pages_otherwise_is_refused(loaded, monkeypatch):
    model = loaded[0]
    monkeypatch.setattr(model.model.layers[0].self_attn, "layer_idx", 1)  # two share one layer
    monkeypatch.setattr("runners.jobs.serve.paging.TOLERANCE", 1e-4)  # so small a model, in fp32

    model.set_attn_implementation("sdpa")

    with pytest.raises(BadInputError, match="cannot be served by this engine"):
        check_paging(model, PagedCache(8), 512)


@pytest.mark.parametrize("tokens", [1, PAGE_TOKENS, PAGE_TOKENS + 1])
def test_tokens_take_whole_pages(tokens):
    assert (pages_for(tokens) - 1) * PAGE_TOKENS < tokens <= pages_for(tokens) * PAGE_TOKENS
