"""Transfer one small KV cache between every pair of engines before serving begins.

The first transfer is the slowest, because the two engines exchange their memory addresses, and
vLLM gives up on that after 5 s. A broken transfer is reported before a client needs it.
"""

import httpx

from runners.jobs.serve.contract import EngineProcessError
from runners.jobs.serve.relayed.engines import Engines
from runners.jobs.serve.relayed.handover import PARAMS, Document, reading_of
from runners.jobs.serve.relayed.process import ServerProcess

TRIES = 3
TRIAL_SECONDS = 120.0  # kernels may be compiled for the first request
PATH = "/v1/completions"
TOKENS = [1, 2, 3]  # token ids that every model has


def hand_over_once(engines: Engines, model: str) -> None:
    """Make each decode engine fetch a prompt from each prefill engine.

    Raises:
        EngineProcessError: a transfer fails, with the engine's message; all are killed.
    """
    try:
        for reader in engines.prefill:
            for writer in engines.decode:
                _try(reader, writer, {"model": model, "prompt": TOKENS, "max_tokens": 2})
    except EngineProcessError:
        engines.kill()
        raise


def _try(reader: ServerProcess, writer: ServerProcess, document: Document) -> None:
    error_text = ""
    for _ in range(TRIES):
        try:
            prefill = _post(reader, reading_of(document))
            answer = _post(writer, document | {PARAMS: prefill.json().get(PARAMS)})
        except (httpx.HTTPError, ValueError, AttributeError) as error:
            error_text = repr(error)
            continue
        if prefill.is_success and answer.is_success:
            return
        error_text = (answer if prefill.is_success else prefill).text
    msg = f"{writer.title} does not fetch what {reader.title} read: {error_text[:300]}"
    raise EngineProcessError(msg)


def _post(engine: ServerProcess, document: Document) -> httpx.Response:
    return httpx.post(
        f"{engine.address}{PATH}",
        json=document,
        headers=engine.headers,
        timeout=TRIAL_SECONDS,
        trust_env=False,
    )
