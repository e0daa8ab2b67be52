"""The official client's loop of tools on a real endpoint, whose model calls one."""

import json
from pathlib import Path

import httpx
import pytest

from runners.jobspec import FolderModel, ServeSpec
from runners.jobspec.serve import key_hash
from runners.shared.event_streams import USAGE_HEADER
from tests.system.jobs.serve.calling import CALL, CONVERSATION, TOOL, make_calling_model
from tests.system.jobs.serve.gguf import build_environment, write_model
from tests.system.jobs.serve.serving import KEY, serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def calling(host) -> Path:
    return make_calling_model(host.path / "models" / "calling")


@pytest.fixture(scope="module", params=["slipway", "llamacpp"])
def endpoint(host, calling, request):
    folder = calling
    if request.param == "llamacpp":
        build_environment(host.path)
        write_model(calling, folder := host.path / "models" / "calling-gguf")
    spec = ServeSpec(
        model=FolderModel(path=str(folder)), engine=request.param, weight_dtype="fp32",
        max_concurrency=2, key_hashes=(key_hash(KEY),),
    )  # fmt: skip
    with serving(host, f"serve-calling-{request.param}", spec, KEY) as found:
        found.address()
        yield found


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_calls_a_tool_and_answers_with_its_result(client, stream):
    messages = CONVERSATION[:1]

    def ask():
        asked = {"model": "model", "messages": messages, "tools": [TOOL], "temperature": 0}
        if not stream:
            return client.chat.completions.create(**asked).choices[0]
        with client.chat.completions.stream(**asked) as events:
            return events.get_final_completion().choices[0]

    first = ask()
    (call,) = first.message.tool_calls
    messages = [
        *messages,
        first.message.model_dump(exclude={"parsed"}),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    last = ask()

    assert (first.message.content, first.finish_reason) == ("I look.", "tool_calls")
    assert (call.function.name, json.loads(call.function.arguments)) == (*CALL.values(),)
    assert (last.message.content, last.finish_reason) == ("It is sunny.", "stop")
    assert "tools" in client.models.retrieve("model").capabilities


def test_a_gateway_is_told_the_tokens_and_those_that_llama_cpp_had_cached(endpoint, request):
    body = {"model": "model", "messages": CONVERSATION[:1], "temperature": 0}
    headers = {"Authorization": f"Bearer {KEY}", USAGE_HEADER: "1"}
    url = f"{endpoint.address()}/v1/chat/completions"

    _, whole = (httpx.post(url, json=body, headers=headers, timeout=300.0) for _ in range(2))
    streamed = httpx.post(url, json=body | {"stream": True}, headers=headers, timeout=300.0)

    prompt, cached, output = map(int, whole.headers[USAGE_HEADER].split())
    usage = whole.json()["usage"]
    assert (prompt, output) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert (0 < cached < prompt) is ("llamacpp" in request.node.name)
    assert streamed.text.rstrip().endswith(f": usage {prompt} {cached} {output}")
