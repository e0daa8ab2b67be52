"""Hand one small cache over between every two engines, before anybody else asks for one.

The first time takes the longest, because the two tell each other where their memory lies, and
vLLM gives up on that after 5 s. A way that does not work at all is told before it is needed.
"""

import httpx

from runners.jobs.serve.contract import EngineLostError
from runners.jobs.serve.relayed.engines import Engines
from runners.jobs.serve.relayed.handover import PARAMS, Document, reading_of
from runners.jobs.serve.relayed.process import ServerProcess

TRIES = 3
TRIAL_SECONDS = 120.0  # kernels may be compiled for the first request
PATH = "/v1/completions"
TOKENS = [1, 2, 3]  # which every model has


def hand_over_once(engines: Engines, model: str) -> None:
    """Have each engine that writes fetch a prompt from each that reads.

    Raises:
        EngineLostError: one does not, in its own words; none is left.
    """
    try:
        for reader in engines.prefill:
            for writer in engines.decode:
                _try(reader, writer, {"model": model, "prompt": TOKENS, "max_tokens": 2})
    except EngineLostError:
        engines.kill()
        raise


def _try(reader: ServerProcess, writer: ServerProcess, document: Document) -> None:
    said = ""
    for _ in range(TRIES):
        try:
            read = _asked(reader, reading_of(document))
            found = _asked(writer, document | {PARAMS: read.json().get(PARAMS)})
        except (httpx.HTTPError, ValueError, AttributeError) as error:
            said = repr(error)
            continue
        if read.is_success and found.is_success:
            return
        said = (found if read.is_success else read).text
    msg = f"{writer.title} does not fetch what {reader.title} read: {said[:300]}"
    raise EngineLostError(msg)


def _asked(engine: ServerProcess, document: Document) -> httpx.Response:
    return httpx.post(
        f"{engine.address}{PATH}",
        json=document,
        headers=engine.headers,
        timeout=TRIAL_SECONDS,
        trust_env=False,
    )
