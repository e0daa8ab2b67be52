"""The official openai client on a real endpoint: both forms, streams, stops, logprobs, errors."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.system.jobs.serve.serving import KEY, until

PROMPT = "import os\n"
CHAT = [{"role": "user", "content": "def"}]


def complete(client, prompt=PROMPT, **changes):
    asked = {"model": "model", "prompt": prompt, "max_tokens": 12, "temperature": 0}
    return client.completions.create(**{**asked, **changes})


def chat(client, **changes):
    asked = {"model": "model", "messages": CHAT, "max_completion_tokens": 12, "temperature": 0}
    return client.chat.completions.create(**{**asked, **changes})


def test_the_model_is_listed_with_its_length(client):
    (model,) = client.models.list().data

    assert model.id == "model"
    assert model.max_model_len == 64
    assert client.models.retrieve("model").id == "model"


def test_greedy_text_is_what_plain_transformers_writes(client, greedy):
    found = complete(client)

    assert found.choices[0].text == greedy(PROMPT, 12)
    assert found.choices[0].finish_reason in ("length", "stop")
    assert found.usage.completion_tokens <= 12


def test_a_conversation_is_answered(client, greedy):
    found = chat(client)

    assert found.choices[0].message.role == "assistant"
    assert found.choices[0].message.content == greedy("user: def\nassistant:", 12)
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens


def test_a_stream_writes_what_the_whole_answer_holds_and_ends_with_usage(client):
    whole = chat(client)

    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))

    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage


def test_a_streamed_completion_has_no_usage_unless_asked(client):
    chunks = list(complete(client, stream=True))

    assert "".join(c.choices[0].text for c in chunks) == complete(client).choices[0].text
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_text_ends_before_a_stop_string(client, stream):
    whole = complete(client).choices[0].text
    stop = whole[len(whole) // 2 :][:3]

    found = complete(client, stop=["never there", stop], stream=stream)

    chunks = list(found) if stream else [found]
    assert "".join(c.choices[0].text for c in chunks) == whole[: whole.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_stream_counts_its_tokens_in_each_chunk_where_it_is_asked_to(client):
    options = {"include_usage": True, "continuous_usage_stats": True}

    chunks = list(complete(client, max_tokens=8, stream=True, stream_options=options))

    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] <= 8


def test_an_answer_that_ignores_the_end_of_text_takes_all_its_tokens(client):
    prompts = [f"def f{at}(" for at in range(8)]

    for each in prompts:
        found = complete(client, each, max_tokens=24, extra_body={"ignore_eos": True})
        assert found.usage.completion_tokens == 24
        assert found.choices[0].finish_reason == "length"


def test_the_same_seed_draws_the_same_text_and_another_one_another(client):
    def drawn(seed):
        return complete(client, temperature=1.5, top_p=0.95, seed=seed).choices[0].text

    texts = [drawn(seed) for seed in (1, 1, 2, 3, 4)]

    assert texts[0] == texts[1]
    assert len(set(texts)) > 1


def test_several_choices_of_several_prompts_come_in_order(client):
    found = complete(client, [PROMPT, "def"], n=2, temperature=1.0, seed=5)

    assert [each.index for each in found.choices] == [0, 1, 2, 3]
    again = complete(client, "def", temperature=1.0, seed=6)
    assert again.choices[0].text == found.choices[3].text


def test_a_prompt_of_tokens_is_taken(client):
    assert complete(client, [1, 2, 3]).usage.prompt_tokens == 3


def test_logprobs_of_the_older_form_tell_tokens_offsets_and_alternatives(client):
    choice = complete(client, logprobs=3).choices[0]

    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.text_offset[:2] == [0, len(logprobs.tokens[0])]
    assert all(len(top) == 3 for top in logprobs.top_logprobs)
    best = max(logprobs.top_logprobs[0].values())
    assert logprobs.token_logprobs[0] == pytest.approx(best)  # greedy takes the likeliest


def test_logprobs_of_a_conversation_tell_bytes_too(client):
    choice = chat(client, logprobs=True, top_logprobs=2).choices[0]

    first = choice.logprobs.content[0]
    assert bytes(first.bytes).decode() == first.token
    assert first.logprob == pytest.approx(first.top_logprobs[0].logprob)
    assert len(first.top_logprobs) == 2


def test_logprobs_come_with_a_stream(client):
    chunks = list(complete(client, logprobs=1, stream=True))

    told = [token for c in chunks for token in c.choices[0].logprobs.tokens]
    assert "".join(told) == complete(client).choices[0].text


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 99}, "n"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"logprobs": 99}, "logprobs"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [100_000]}, "prompt"),
        ({"extra_body": {"best_off": 2}}, "best_off"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"100000": 1}}, "logit_bias"),
        ({"extra_body": {"top_k": -2}}, "top_k"),
    ],
)
def test_a_wrong_field_is_refused_by_its_name(client, changes, param):
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, **changes)

    assert refused.value.param == param
    assert param in refused.value.message


def test_tools_are_refused_and_not_forgotten(client):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}

    with pytest.raises(openai.BadRequestError, match="template does not take tools"):
        chat(client, tools=[tool])


def test_a_request_longer_than_the_context_is_refused_with_the_lengths(client):
    with pytest.raises(openai.BadRequestError, match="maximum context length is 64") as refused:
        complete(client, max_tokens=64)

    assert refused.value.code == "context_length_exceeded"


def test_a_wrong_key_is_refused(endpoint):
    with pytest.raises(openai.AuthenticationError) as refused:
        complete(endpoint.client("sk-wrong"))

    assert refused.value.code == "invalid_api_key"


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as refused:
        complete(client, model="gpt-x")

    assert refused.value.code == "model_not_found"


def test_sixty_four_clients_at_once_get_what_each_would_get_alone(endpoint, client):
    prompts = [f"def f{at}(" for at in range(8)]
    alone = [complete(client, each, max_tokens=24).choices[0].text for each in prompts]

    def streamed(at):
        chunks = complete(client, prompts[at % 8], max_tokens=24, stream=True)
        return "".join(chunk.choices[0].text for chunk in chunks)

    with ThreadPoolExecutor(64) as pool:
        texts = list(pool.map(streamed, range(64)))

    assert texts == alone * 8
    until(lambda: endpoint.figure("slipway_running_requests") == 0, "somebody still runs")
    assert endpoint.figure("slipway_kv_cache_used_ratio") == 0


def test_a_client_that_goes_away_frees_its_place_and_pages(endpoint, client):
    before = endpoint.figure("slipway_requests_cancelled_total")
    stream = complete(client, max_tokens=50, stream=True, n=16, temperature=1.0)
    next(iter(stream))

    stream.response.close()

    until(
        lambda: endpoint.figure("slipway_requests_cancelled_total") > before,
        "nobody was cancelled",
    )
    until(lambda: endpoint.figure("slipway_kv_cache_used_ratio") == 0, "pages are still held")


def test_the_metrics_page_counts_what_was_answered(endpoint, client):
    before = endpoint.figure("slipway_output_tokens_total")

    used = complete(client).usage

    assert endpoint.figure("slipway_output_tokens_total") - before == used.completion_tokens
    assert endpoint.figure("slipway_ttft_seconds_count") > 0
    assert endpoint.figure('slipway_tpot_seconds_bucket{le="+Inf"}') > 0


def test_the_clients_own_conversation_goes_on_with_the_answer_it_got(client):
    messages = [*CHAT]
    for _ in range(2):
        answer = chat(client, messages=messages, max_completion_tokens=4)
        messages += [answer.choices[0].message, {"role": "user", "content": "go on"}]
    streamed = chat(client, messages=messages, max_completion_tokens=4, stream=True)

    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens > chat(client).usage.prompt_tokens
    assert streamed.response.headers["x-accel-buffering"] == "no"
    assert [chunk.choices[0].finish_reason for chunk in streamed][-1] in ("length", "stop")


def test_a_monitor_and_a_client_of_another_spelling_are_answered(endpoint):
    url, lower = endpoint.address(), {"Authorization": f"bearer  {KEY}"}

    head = httpx.head(f"{url}/health")

    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == httpx.get(f"{url}/health").headers["content-length"]
    assert httpx.get(f"{url}/v1/models/", headers=lower).json()["data"][0]["id"] == "model"
    options = httpx.options(f"{url}/v1/chat/completions")
    assert (options.status_code, options.headers["allow"]) == (204, "POST, OPTIONS")


def test_a_bias_decides_which_token_is_written(client):
    def written(token):
        choice = complete(client, max_tokens=3, logprobs=0, logit_bias={token: 100}).choices[0]
        return choice.logprobs.tokens

    first, second = written("70"), written("71")

    assert (len(first), len(set(first)), len(set(second))) == (3, 1, 1)
    assert first != second


def test_the_responses_api_is_answered_and_its_answer_sent_back(client):
    first = client.responses.create(model="model", input="def", max_output_tokens=6)
    again = [{"role": "user", "content": "def"}, *first.output, {"role": "user", "content": "go"}]
    second = client.responses.create(model="model", input=again, max_output_tokens=6)
    events = list(
        client.responses.create(model="model", input="def", max_output_tokens=6, stream=True)
    )
    deltas = [each.delta for each in events if each.type == "response.output_text.delta"]

    assert second.usage.input_tokens > first.usage.input_tokens > 0
    assert "".join(deltas) == events[-1].response.output_text
    assert events[-1].type in ("response.completed", "response.incomplete")
    with pytest.raises(openai.BadRequestError, match="previous_response_id is not supported"):
        client.responses.create(model="model", input="go", previous_response_id=first.id)
