"""Requests as coding agents send them: what reaches the model, and what each agent reads.

``agents.json`` names the source of each agent's fields.
"""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from runners.jobs.serve.contract import Limits
from runners.jobs.serve.relayed.relay import parse_request
from tests.runners.jobs.serve.test_conversations import events
from tests.runners.jobs.serve.test_openai_server import CHAT, Door
from tests.runners.jobs.serve.test_tool_calls import Scripted

RECORDED = json.loads(Path(__file__).with_name("agents.json").read_text())
REQUESTS = RECORDED["requests"]
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
SYSTEM = "You work in a workspace."


def call_of(name: str, arguments: dict) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"I look.\n<tool_call>\n{body}\n</tool_call>"


@pytest.mark.parametrize("at", range(len(REQUESTS)))
def test_each_agents_request_is_answered_and_its_tools_and_history_reach_the_model(at):
    asked = REQUESTS[at]
    assert asked["agent"] in RECORDED["sources"]
    body, path = asked["body"], asked["path"]
    model = Scripted("ok.")
    model.engine.limits = Limits(4, 4, 512, frozenset())
    door = Door(model)
    answer = door.ask("POST", path, headers=asked["headers"], json=body)

    assert answer.status_code == 200, answer.text
    if "count_tokens" in path:
        assert answer.json()["input_tokens"] > 0
    else:
        assert "ok." in answer.text
        assert '"error":{' not in answer.text
    (turns,), (tools,) = model.asked, model.tools
    names = [each["function"]["name"] for each in tools or ()]
    sent = [
        each.get("name") or each.get("function", {}).get("name") for each in body.get("tools", ())
    ]
    assert names == [each for each in sent if each is not None]
    roles = [each["role"] for each in turns]
    assert len(set(roles) - {"system", "user", "assistant", "tool"}) == 0
    assert ("assistant", "assistant") not in pairwise(roles)
    calls = [call["id"] for each in turns for call in each.get("tool_calls", ())]
    assert calls == [each["tool_call_id"] for each in turns if each["role"] == "tool"]
    if calls and asked["agent"] != "qwen-code":
        called = next(each for each in turns if "tool_calls" in each)
        assert called["reasoning_content"] == "I search."
    if path == CHAT:  # and by an engine with an API of its own
        assert parse_request(CHAT, json.dumps(body).encode(), "vllm").model == "model"


def test_codex_has_its_custom_tool_called_with_a_text_whole_and_streamed():
    asked = REQUESTS[0]["body"]
    patch = "*** Begin Patch\n+é"
    written = call_of("apply_patch", {"input": patch})
    whole = Door(Scripted(written)).ask("POST", RESPONSES, json=asked | {"stream": False}).json()
    message, call = whole["output"]
    assert message["content"][0]["text"] == "I look."
    assert (call["type"], call["name"], call["input"]) == (
        "custom_tool_call",
        "apply_patch",
        patch,
    )
    assert [each["type"] for each in whole["tools"]] == ["function", "function", "custom"]

    model = Scripted(written)
    found = events(Door(model).ask("POST", RESPONSES, json=asked))
    deltas = [
        data["delta"] for name, data in found if name.endswith("custom_tool_call_input.delta")
    ]
    done = [data["item"] for name, data in found if name == "response.output_item.done"]
    assert ("".join(deltas), done[-1]["input"]) == (patch, patch)
    (tool,) = [each for each in model.tools[0] if each["function"]["name"] == "apply_patch"]
    assert "*** Begin Patch" in tool["function"]["description"]


def test_claude_code_has_an_answer_as_long_as_the_context_leaves_room_for():
    asked = REQUESTS[4]["body"]
    model = Scripted(call_of("Read", {"file_path": "/a"}))
    found = events(Door(model).ask("POST", MESSAGES, json=asked))
    blocks = [data["content_block"] for name, data in found if name == "content_block_start"]
    assert [each["type"] for each in blocks] == ["text", "tool_use"]
    (request,) = model.submitted
    assert request.sampling.max_tokens == 64 - len(request.prompt)  # of 32,000
    assert model.asked[0][0] == {"role": "system", "content": f"billing header{SYSTEM}"}


def test_what_an_agent_asks_of_other_servers_is_refused_by_name():
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    search = {"type": "web_search_20250305", "name": "web_search"}
    codex, claude = REQUESTS[0]["body"], REQUESTS[4]["body"]
    for path, sent, words in (
        (RESPONSES, codex | {"tools": [{"type": "local_shell"}]}, "tools.0: input tag 'local_shell'"),
        (RESPONSES, codex | {"tools": [{"type": "namespace", "name": "a"}]}, "tools.0: input tag"),
        (RESPONSES, codex | {"previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES, codex | {"include": ["message.output_text.logprobs"]}, "include.0"),
        (MESSAGES, claude | {"tools": [search]}, "tools.0.type"),
        (MESSAGES, claude | {"mcp_servers": [{}]}, "mcp_servers"),
        (MESSAGES, claude | {"messages": [{"role": "user", "content": [image]}]},
         "messages.0.content.0: images are not taken (image)"),
    ):  # fmt: skip
        answer = Door(Scripted("a")).ask("POST", path, json=sent)
        assert answer.status_code == 400, (path, words)
        assert words in answer.json()["error"]["message"]
