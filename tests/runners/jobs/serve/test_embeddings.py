"""Embeddings by the official client: pooled hidden states, batches, long texts, refusals."""

import asyncio
import json
import threading

import pytest
import torch

from runners.jobs.loading import fresh_model, ready, use_attn_implementation
from runners.jobs.serve.contract import Limits, Sampling
from runners.jobs.serve.engine import AnswerSequence, EmbeddedText, Engine
from runners.jobs.serve.figures import EndpointMetrics
from runners.jobs.serve.own_backend import TransformersServingModel
from runners.jobs.serve.paging import PagedCache, check_paging
from runners.jobs.serve.pooling import Pooling, UnpooledError, pooling_of
from runners.jobs.serve.text import RequestTokenizer
from runners.jobspec import FolderModel
from runners.shared.event_streams import USAGE_HEADER
from tests.hub.models import make_tokenizer
from tests.runners.jobs.serve.test_event_stream import Forwarding
from tests.runners.jobs.serve.test_openai_server import OWN, Door, Echo
from tests.runners.jobs.serve.test_tool_calls import openai_of
from tests.runners.jobs.tiny import TINY_CONFIG

PATH = "/v1/embeddings"
TEXTS = [
    "A cache",
    "a",
    "The kernel reads a page, and the next reader finds it there. " * 4,
    "b c",
]
STEP_TOKENS = 24  # less than the long text has


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(5)
    config = {**TINY_CONFIG, "vocab_size": 1024, "max_position_embeddings": 512}
    made = ready(fresh_model(config, torch.float32))
    check_paging(made, PagedCache(8), 1024)
    return made


@pytest.fixture
def reader(tmp_path):
    return RequestTokenizer(make_tokenizer(tmp_path))


@pytest.fixture
def serve(model, reader):
    """Return a server whose engine runs, of a pooling."""
    engines: list[tuple[Engine, threading.Thread]] = []

    def start(pooling: Pooling | None) -> Door:
        limits = Limits(4, 8, 256, frozenset({2}), STEP_TOKENS)
        engine = Engine(model, PagedCache(24), limits, EndpointMetrics(), pooling=pooling)
        thread = threading.Thread(target=engine.run)
        thread.start()
        engines.append((engine, thread))
        refusal = "" if pooling else "no modules.json"
        return Door(TransformersServingModel(engine, reader, 1024, None, "", refusal))

    yield start
    for engine, thread in engines:
        engine.close()
        thread.join()


def expected(model, ids, mode: str) -> torch.Tensor:
    """Return the pooled states of one text alone, by transformers' own attention."""
    with use_attn_implementation(model, "eager"), torch.inference_mode():
        states = model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return states[-1] if mode == "lasttoken" else states.mean(dim=0)


@pytest.mark.parametrize("pooling", [Pooling("lasttoken", True), Pooling("mean", False)])
def test_the_official_client_has_the_pooled_states_as_numbers_and_in_base64(
    serve, model, reader, pooling
):
    door = serve(pooling)

    async def ask():
        async with openai_of(door) as client:
            return [
                await client.embeddings.create(model="model", input=texts, **form)
                for texts, form in (
                    (TEXTS, {"encoding_format": "float"}),
                    (TEXTS, {}),  # the client asks for base64 and decodes it
                    (reader.prompt_ids(TEXTS[0]), {"dimensions": 64}),
                )
            ]

    plain, decoded, of_tokens = asyncio.run(ask())
    ids = [reader.prompt_ids(each) for each in TEXTS]
    assert len(ids[2]) > 2 * STEP_TOKENS
    for at, each in enumerate(ids):
        wanted = expected(model, each, pooling.mode)
        wanted = torch.nn.functional.normalize(wanted, dim=0) if pooling.is_normalised else wanted
        for answer in (plain, decoded):
            found = torch.tensor(answer.data[at].embedding)
            assert torch.allclose(found, wanted, atol=1e-4), (at, answer.data[at].index)
    assert of_tokens.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-5)
    assert plain.usage.prompt_tokens == sum(map(len, ids))
    counted = door.ask(
        "POST", PATH, json={"model": "model", "input": "a"}, headers={USAGE_HEADER: "1"}
    )
    assert counted.headers[USAGE_HEADER] == f"{len(ids[1])} 0 0"
    (card,) = door.ask("GET", "/v1/models").json()["data"]
    assert "embeddings" in card["capabilities"]
    engine = door.service.loaded.engine
    assert engine.wait_until_idle(60)
    assert engine.cache.used_ratio == 0.0


@pytest.fixture
def engine(model):
    limits = Limits(4, 8, 256, frozenset(), 256)
    return Engine(model, PagedCache(12), limits, EndpointMetrics(), pooling=Pooling("mean", False))


def answer_of(reader, pieces: list, tokens: int) -> AnswerSequence:
    wish = Sampling(tokens, temperature=0.0)
    return AnswerSequence(reader.prompt_ids("a b"), wish, reader.answer(wish.stops), pieces.append)


def test_texts_and_answers_that_need_the_same_pages_both_come_to_an_end(engine, reader):
    pieces, found = [], []
    engine.submit([answer_of(reader, pieces, 60)])
    for _ in range(80):  # a text at every step
        if not engine._texts:
            engine.submit_texts([EmbeddedText([5] * 150, found.append)])
        engine._step()
    assert pieces[-1].finish_reason == "length"
    assert len(found) > 20

    pieces, found = [], []
    for at in range(100):  # an answer whenever one has ended, while a text waits for their pages
        if engine.num_open < 6:
            engine.submit([answer_of(reader, pieces, 10 + at % 7)])
        if at == 5:
            engine.submit_texts([EmbeddedText([5] * 150, found.append)])
        engine._step()
    assert len(found) == 1
    assert sum(each.finish_reason == "length" for each in pieces) > 10


def test_a_text_that_is_being_read_is_open_and_is_told_of_a_fault(engine, monkeypatch):
    found, seen = [], []

    def fails(*_):
        seen.append(engine.num_open)
        raise MemoryError

    monkeypatch.setattr("runners.jobs.serve.engine.embedded", fails)
    engine.submit_texts([EmbeddedText([5] * size, found.append) for size in (150, 250)])
    engine._record_step(0.0, 0)
    assert engine.figures.since_last(1.0)["waiting_requests"] == 2.0
    with pytest.raises(MemoryError):
        engine.run()
    assert (seen, found) == ([2], [None, None])


def test_embeddings_are_refused_by_name_where_there_are_none(serve):
    door = serve(Pooling("mean", False))
    for at, sent, param, words in (
        (door, {"input": ["a", ""]}, "input", "at least 1 character"),
        (door, {"input": TEXTS[2] * 5}, "input", "maximum context length is 256"),
        (door, {"input": "a", "dimensions": 8}, "dimensions", "embeddings have 64"),
        (door, {"input": ["a"] * 20}, "n", "20 answers"),
        (door, {"input": "a", "encoding_format": "int8"}, "encoding_format", "int8"),
        (serve(None), {"input": "a"}, "model", "no modules.json"),
        (Door(Echo()), {"input": "a"}, "model", "serve the model with Slipway's own engine"),
        (Door(Forwarding(None), engine="vllm"), {"input": "a"}, "model", "Slipway's own engine"),
    ):
        answer = at.ask("POST", PATH, json={"model": "model", **sent})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), (sent, error)
        assert words in error["message"], (sent, error)
    (card,) = Door(Echo(), engine=OWN).ask("GET", "/v1/models").json()["data"]
    assert "embeddings" not in card["capabilities"]


def test_a_folder_says_how_its_model_pools(tmp_path, model):
    folder = tmp_path / "models" / "embedder"
    (folder / "1_Pooling").mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    package = "sentence_transformers.models"
    kinds = {"modules": ["Transformer", "Pooling", "Normalize"]}
    for modules, pooling, expected in (
        (kinds["modules"], {"pooling_mode_lasttoken": True, "include_prompt": True},
         Pooling("lasttoken", True)),
        (kinds["modules"][:2], {"pooling_mode": "mean"}, Pooling("mean", False)),
        (kinds["modules"], {"pooling_mode_cls_token": True}, "pools by cls; this engine has lastt"),
        (kinds["modules"], {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True},
         "pools by lasttoken, mean"),
        ([*kinds["modules"], "Dense"], {"pooling_mode": "mean"}, "has the module Dense"),
        (None, {}, "has no modules.json, so that it is no embedding model"),
    ):  # fmt: skip
        (folder / "modules.json").unlink(missing_ok=True)
        if modules is not None:
            listed = [{"idx": at, "path": "", "type": f"{package}.{each}"}
                      for at, each in enumerate(modules)]  # fmt: skip
            (folder / "modules.json").write_text(json.dumps(listed))
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        ref = FolderModel(path="embedder")
        if isinstance(expected, Pooling):
            assert pooling_of(ref, tmp_path, model) == expected
            continue
        with pytest.raises(UnpooledError, match=expected):
            pooling_of(ref, tmp_path, model)
