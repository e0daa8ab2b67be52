"""Documents that an engine ranks by a query: what it is asked, the answer, and who refuses."""

from types import SimpleNamespace

import pytest

from runners.jobs.serve.relayed.backend import ranking_refusal
from runners.jobs.serve.relayed.relay import RelayServingModel
from runners.shared.event_streams import USAGE_HEADER
from tests.runners.jobs.serve.test_event_stream import Forwarding
from tests.runners.jobs.serve.test_openai_server import Door, Echo
from tests.runners.jobs.serve.test_usage import DIALECTS, relayed  # noqa: F401 -- a fixture

PATH = "/v1/rerank"
ASKED = {
    "model": "model",
    "query": "the port",
    "documents": ["a host", {"text": "the port"}, "the"],
}


@pytest.fixture
def ranking(relayed, monkeypatch) -> Door:  # noqa: F811
    monkeypatch.setenv("VLLM_API_KEY", "engine")
    relayed.service.loaded.ranking_refusal = ""
    return relayed


def test_documents_come_in_the_engines_order_and_are_counted(ranking):
    whole = ranking.ask("POST", PATH, json=ASKED, headers={USAGE_HEADER: "1"})
    found = whole.json()
    assert [each["index"] for each in found["results"]] == [1, 2, 0]
    assert [each["relevance_score"] for each in found["results"]] == [1.0, 0.5, 0.0]
    assert found["results"][0]["document"] == {"text": "the port"}
    assert (found["model"], found["usage"]["total_tokens"]) == ("model", 11)
    assert whole.headers[USAGE_HEADER] == "11 0 0"
    first = ranking.ask("POST", PATH, json=ASKED | {"top_n": 1, "return_documents": False}).json()
    assert first["results"] == [{"index": 1, "relevance_score": 1.0}]
    (card,) = ranking.ask("GET", "/v1/models").json()["data"]
    assert card["capabilities"] == ["rerank"]
    for path, asked in DIALECTS.items():
        assert "writes no text" in ranking.ask("POST", path, json=asked).json()["error"]["message"]
    engine = ranking.service.loaded.engine
    assert (engine.num_open, engine.engines.all[0].kill.called) == (0, False)


def test_what_cannot_be_ranked_is_refused_by_name(ranking):
    for door, sent, param, words in (
        (ranking, {"documents": []}, "documents", "at least 1 item"),
        (ranking, {"documents": ["a", {"text": ""}]}, "documents", "documents.1: string"),
        (ranking, {"documents": [{"image": "a"}]}, "documents", "documents.0: input should be"),
        (ranking, {"documents": ["a"] * 1001}, "documents", "at most 1000"),
        (ranking, {"top_n": 0}, "top_n", "greater than or equal to 1"),
        (ranking, {"max_tokens_per_doc": 4}, "max_tokens_per_doc", "max_tokens_per_doc"),
        (ranking, {"query": "a b c d e"}, None, "maximum context length is 4"),
        (Door(Echo()), {}, "model", "own engine ranks no documents; serve a model for that with vLLM"),
        (Door(Forwarding(None), engine="vllm"), {}, "model", "it ranks none"),
    ):  # fmt: skip
        answer = door.ask("POST", PATH, json=ASKED | sent)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), (sent, error)
        assert words in error["message"], (sent, error)
    assert "rerank" not in Door(Echo()).ask("GET", "/v1/models").json()["data"][0]["capabilities"]


@pytest.mark.parametrize(
    "ranked", [{}, {"usage": {"prompt_tokens": 1}, "id": "1", "results": [{"index": 9}]}]
)
def test_an_answer_of_another_form_is_the_engines_error(ranking, monkeypatch, ranked):
    async def rank(_self, _model, _document):
        return ranked

    monkeypatch.setattr(RelayServingModel, "rank", rank)
    answer = ranking.ask("POST", PATH, json=ASKED)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_error")


def test_an_engine_ranks_where_it_has_the_address():
    def process(status):
        return SimpleNamespace(get={PATH: status and SimpleNamespace(status_code=status)}.get)

    assert ranking_refusal("vllm", process(405)) == ""
    for status in (404, None):
        assert "--runner pooling" in ranking_refusal("vllm", process(status))
    assert "SGLang ranks no documents" in ranking_refusal("sglang", process(405))
