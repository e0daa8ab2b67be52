"""A running endpoint, watched as if somebody else had started it."""

import asyncio

import pytest

from tests.system.jobs.serve.serving import KEY
from webapp.servers.figures import History
from webapp.servers.reading import Target, UnreadableError, probe


def test_what_an_endpoint_answered_is_what_is_read_of_it(endpoint, client):
    url = endpoint.address().removesuffix("/v1")

    def look(key: str = KEY):
        return asyncio.run(probe(Target(url, key, allows_loopback=True)))

    with pytest.raises(UnreadableError, match="refuses the key"):
        look(key="")
    history = History()
    history.add(look().reading, 0.0)
    model = client.models.list().data[0].id
    usages = [
        client.completions.create(model=model, prompt="One of", max_tokens=12).usage
        for _ in range(5)
    ]
    found = look()
    window = history.add(found.reading, 10.0).window
    assert (found.engine, [each.name for each in found.models]) == ("slipway", [model])
    assert window.requests == len(usages)
    assert window.input_tokens == sum(each.prompt_tokens for each in usages) / len(usages)
    assert window.output_tokens == sum(each.completion_tokens for each in usages) / len(usages)
    assert window.figures["tokens_per_second"] == window.output_tokens * len(usages) / 10.0
    for name in ("ttft", "tpot"):
        low, high = (window.figures[f"{name}_p{percent}_seconds"] for percent in (50, 95))
        assert 0 < low <= high
