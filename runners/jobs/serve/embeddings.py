"""``POST /v1/embeddings``: the request, and OpenAI's document of the answer."""

import base64
import struct
from collections.abc import Sequence
from typing import Literal

from runners.jobs.serve.openai_requests import (
    ClientFields,
    Document,
    Ignored,
    Prompt,
    RequestError,
    checked,
    prompts_of,
    read_document,
)


class EmbeddingRequest(ClientFields):
    """Texts, or their tokens, of which each has an embedding."""

    model: str
    input: Prompt
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: Ignored = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return each text, as text or as tokens."""
        return prompts_of(self.input)

    def document(self, embeddings: Sequence[Sequence[float]], tokens: int) -> Document:
        """Return the answer; ``tokens`` are those of all texts.

        Raises:
            RequestError: another number of dimensions is asked for.
        """
        size = len(embeddings[0])
        if self.dimensions not in (None, size):
            message = (
                f"dimensions: the model's embeddings have {size}, and are not shortened here "
                f"(given: {self.dimensions}); leave it out"
            )
            raise RequestError(400, message, param="dimensions", code="unsupported_parameter")
        data = [
            {"object": "embedding", "index": at, "embedding": self._encoded(each)}
            for at, each in enumerate(embeddings)
        ]
        used = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": self.model, "usage": used}

    def _encoded(self, embedding: Sequence[float]) -> Sequence[float] | str:
        """Return numbers, or in base64 fp32 numbers, the lowest byte first."""
        if self.encoding_format == "float":
            return embedding
        return base64.b64encode(struct.pack(f"<{len(embedding)}f", *embedding)).decode()


def check_texts(texts: Sequence[Sequence[int]], longest: int) -> None:
    """Check the tokens of texts against the longest that the model reads.

    Raises:
        RequestError: a text is longer, or has no token.
    """
    for at, each in enumerate(texts):
        if len(each) > longest:
            message = (
                f"This model's maximum context length is {longest} tokens, and input.{at} has "
                f"{len(each)}. Please reduce its length."
            )
            raise RequestError(400, message, param="input", code="context_length_exceeded")
        if not each:
            raise RequestError(400, f"input.{at} holds no token", param="input")


def parse_embedding(body: bytes) -> EmbeddingRequest:
    """Return the parsed request.

    Raises:
        RequestError: a field is invalid; the error names it.
    """
    return checked(EmbeddingRequest.model_validate, read_document(body))
