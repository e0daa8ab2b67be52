"""``POST /v1/rerank``: documents in the order in which they fit a query, by engines that have it.

The form is that of Jina and Cohere, as vLLM reads it
(``vllm/entrypoints/pooling/scoring/protocol.py``); an engine's own scores are passed on.
"""

from typing import Annotated

from pydantic import BeforeValidator, Field

from runners.jobs.serve.openai_requests import (
    ClientFields,
    Document,
    Ignored,
    RequestError,
    Text,
    checked,
    read_document,
)
from runners.jobspec.engines import ROWS, Engine, titles

RERANK = "/v1/rerank"
MAX_DOCUMENTS = 1000  # as Cohere's API advises


def _text_of(sent: object) -> object:
    """Return the text of a document that is an object, as Jina has it."""
    return sent["text"] if isinstance(sent, dict) and sent.keys() == {"text"} else sent


class RerankRequest(ClientFields):
    """A query, and the documents that are ranked by it."""

    model: str
    query: Text
    documents: Annotated[
        list[Annotated[Text, BeforeValidator(_text_of)]],
        Field(fail_fast=True, min_length=1, max_length=MAX_DOCUMENTS),
    ]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = True
    user: Ignored = None

    @property
    def engine_body(self) -> Document:
        """Return what an engine is asked; it answers with the documents of all ranks."""
        return {"query": self.query, "documents": self.documents, "top_n": self.top_n or 0}

    def document(self, ranked: Document) -> Document:
        """Return an engine's answer as this client asked for it.

        Raises:
            RequestError: the answer has another form.
        """
        try:
            usage = ranked["usage"]
            tokens = int(usage.get("prompt_tokens", usage["total_tokens"]))
            results = [self._result(each) for each in ranked["results"]]
            head = {"id": str(ranked["id"]), "model": self.model}
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            message = "The engine did not say how the documents rank."
            raise RequestError(500, message, code="engine_error") from None
        used = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {**head, "usage": used, "results": results}

    def _result(self, found: Document) -> Document:
        at = int(found["index"])
        result = {"index": at, "relevance_score": float(found["relevance_score"])}
        text = self.documents[at]
        return result | ({"document": {"text": text}} if self.return_documents else {})


def unranked(engine: Engine) -> str:
    """Return why an engine without the address ranks no documents, and the way out."""
    others = titles((each for each in ROWS if each.ranks_documents), "or")
    return f"{engine.title} ranks no documents; serve a model for that with {others}"


def parse_rerank(body: bytes) -> RerankRequest:
    """Return the parsed request.

    Raises:
        RequestError: a field is invalid; the error names it.
    """
    return checked(RerankRequest.model_validate, read_document(body))
