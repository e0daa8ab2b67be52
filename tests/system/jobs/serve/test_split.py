"""One engine reads prompts and another writes: our door between stand-ins that hold it to form."""

import contextlib
import json
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import psutil
import pytest

from runners.jobs.runtime import BadInputError
from runners.jobs.serve.relayed.backend import split_engines
from runners.jobs.serve.relayed.relay import is_prefilled_elsewhere, parse_request, prefill_body
from runners.jobspec import ServeSpec
from runners.jobspec.serve import EngineOptions, PhaseSplit, key_hash
from tests.plugins.extent import first
from tests.runners.jobs.serve.speaking import STANDIN, recorded_options
from tests.system.jobs.harness import PROJECT
from tests.system.jobs.serve.serving import KEY, complete, kill_until_given_up, starter, until

MODULE = "runners.jobs.serve.vllm"
ENV = {
    "PYTHONPATH": f"{PROJECT}:{STANDIN}",
    "VLLM_OPTIONS": " ".join(sorted(recorded_options("vllm"))),
    "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c",
}
OPTIONS = EngineOptions(split=PhaseSplit(prefill_engines=1, decode_engines=2))
SLOW = "slowly " + " ".join(f"word{at}" for at in range(60))


@pytest.fixture(scope="module")
def spec(trained_model) -> ServeSpec:
    return ServeSpec(
        model=trained_model, engine="vllm", engine_options=OPTIONS, max_concurrency=8,
        queue_limit=4, max_length=64, key_hashes=(key_hash(KEY),),
    )  # fmt: skip


@pytest.fixture(scope="module")
def start(host):
    return starter(host, MODULE, ENV)


@pytest.fixture(scope="module")
def endpoint(start, spec):
    with start("split", spec) as found:
        found.address()
        yield found


def engines_of(endpoint) -> dict[str, psutil.Process]:
    """Return the engines behind an endpoint by the GPU that each was given."""
    children = psutil.Process(endpoint.process.pid).children()
    return {each.environ()["CUDA_VISIBLE_DEVICES"]: each for each in children}


def labelled(endpoint, name: str) -> dict[str, float]:
    """Return a figure of the metrics page by the engine that it is of, once it was read."""

    def read() -> list[str]:
        page = endpoint.get("/metrics").text
        return [each for each in page.splitlines() if each.startswith(name)]

    lines = until(read, f"{name} is not shown")
    return {
        each.split('slipway_engine="')[1].split('"')[0]: float(each.split()[-1]) for each in lines
    }


def counted(endpoint, name: str) -> dict[str, float]:
    """Return a figure as each engine itself has it now, by its GPU."""
    pages = {gpu: httpx.get(f"{behind(each)[0].rpartition('/v1')[0]}/metrics").text
             for gpu, each in engines_of(endpoint).items()}  # fmt: skip
    return {
        gpu: float(line.split()[-1])
        for gpu, page in pages.items()
        for line in page.splitlines()
        if line.startswith(name)
    }


def test_a_prompt_is_read_by_one_engine_and_answered_by_another_with_its_cache(endpoint, client):
    before = counted(endpoint, "standin:prompts_read_total")

    whole = complete(client, "one two three", max_tokens=3)
    chunks = list(complete(client, "four five six", max_tokens=3, stream=True))

    assert (whole.choices[0].text, whole.usage.completion_tokens) == ("one two three", 3)
    assert "".join(each.choices[0].text for each in chunks).split() == ["four", "five", "six"]
    writers = {whole.system_fingerprint, chunks[0].system_fingerprint}
    assert writers <= {"kv_consumer on GPU-b", "kv_consumer on GPU-c"}
    read = counted(endpoint, "standin:prompts_read_total")
    assert read == before | {"GPU-a": before["GPU-a"] + 2}  # by the one that reads, and it alone
    assert counted(endpoint, "vllm:kv_cache_usage_perc{")["GPU-a"] == 0


def test_what_was_read_is_kept_no_longer_than_until_it_is_fetched(endpoint, client):
    before = counted(endpoint, "standin:fetched_total")["GPU-a"]
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(complete, client, f"a b c d {at}", max_tokens=5) for at in range(8)]
        texts = {each.result(timeout=600).choices[0].text for each in asked}

    assert texts == {f"a b c d {at}" for at in range(8)}
    assert counted(endpoint, "standin:fetched_total")["GPU-a"] == before + 8
    assert counted(endpoint, "vllm:kv_cache_usage_perc{")["GPU-a"] == 0


def test_a_conversation_with_tools_is_read_without_being_held_to_a_call(client):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    messages = [{"role": "user", "content": "please call it"}]

    said = client.chat.completions.create(
        model="model", messages=messages, tools=tools, tool_choice="required", max_tokens=2
    )

    assert said.choices[0].message.content == "please call"
    assert said.system_fingerprint.startswith("kv_consumer")


def test_several_answers_are_written_by_an_engine_that_reads_for_itself(client):
    found = complete(client, "p q r", n=3, max_tokens=2, logprobs=1, stop=["q"])

    assert [(each.index, each.text) for each in found.choices] == [(at, "p r") for at in range(3)]
    assert found.choices[2].logprobs.tokens == ["p", "r"]
    assert found.system_fingerprint.startswith("kv_consumer")


@pytest.mark.parametrize("stream", [False, True])
def test_one_token_is_there_once_the_prompt_is_read_and_nothing_travels(endpoint, client, stream):
    before = counted(endpoint, "standin:fetched_total")

    found = complete(client, "only this", max_tokens=1, stream=stream)
    (first, *rest) = list(found) if stream else [found]

    assert (first.choices[0].text.strip(), rest) == ("only", [])
    assert first.system_fingerprint == "kv_producer on GPU-a"
    assert counted(endpoint, "standin:fetched_total") == before


@pytest.mark.parametrize("when", ["early", "late"])
def test_what_either_engine_refuses_comes_back_in_our_form_and_nothing_stays(
    endpoint, client, when
):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, f"it is refused {when}", max_tokens=3)

    assert caught.value.code == "context_length_exceeded"
    assert counted(endpoint, "vllm:kv_cache_usage_perc{")["GPU-a"] == 0
    assert complete(client, "and on", max_tokens=2).choices[0].text == "and on"


def test_the_stand_ins_hold_us_to_the_protocol(endpoint):
    (reader,) = [each for name, each in engines_of(endpoint).items() if name == "GPU-a"]
    address, headers = behind(reader)
    asked = {"model": "m", "prompt": "a b", "kv_transfer_params": {"do_remote_decode": True}}

    whole = httpx.post(address, json=asked | {"max_tokens": 5}, headers=headers)
    kept = httpx.post(address, json=asked | {"max_tokens": 1}, headers=headers).json()
    writer, others = behind(engines_of(endpoint)["GPU-b"])
    params = kept["kv_transfer_params"]
    again = {"model": "m", "prompt": "a b", "max_tokens": 2}
    unknown = params | {"remote_request_id": "another"}
    codes = [
        httpx.post(writer, json=again | {"kv_transfer_params": each}, headers=others).status_code
        for each in (unknown, params | {"remote_block_ids": None}, params, params)
    ]

    assert (whole.status_code, codes) == (500, [500, 500, 200, 500])


def behind(engine: psutil.Process) -> tuple[str, dict[str, str]]:
    """Return where an engine itself is asked, and with which key."""
    words = engine.cmdline()
    port = words[words.index("--port") + 1]
    return f"http://127.0.0.1:{port}/v1/completions", {
        "Authorization": f"Bearer {engine.environ()['VLLM_API_KEY']}"
    }


def test_figures_count_each_request_once_and_tell_the_engines_apart(endpoint, client):
    # no engine sees a request from its beginning to its first token: the door does
    names = ("slipway_prompt_tokens_total", "slipway_output_tokens_total",
             "slipway_ttft_seconds_count", "slipway_ttft_seconds_sum")  # fmt: skip
    time.sleep(2.5)  # two looks at the engines' pages: what others asked is counted
    before = [endpoint.figure(name) for name in names]

    list(complete(client, SLOW, max_tokens=20, stream=True))
    complete(client, "a b c", max_tokens=3)

    until(lambda: endpoint.figure(names[1]) >= before[1] + 23, "tokens are not counted")
    prompts, tokens, firsts, seconds = (
        endpoint.figure(name) - old for name, old in zip(names, before, strict=True)
    )
    assert (prompts, tokens, firsts) == (61 + 3, 20 + 3, 1)
    assert 0.04 < seconds < 10
    text = endpoint.get("/metrics").text
    assert text.count("# TYPE vllm:num_requests_running gauge") == 1
    assert set(labelled(endpoint, "vllm:num_requests_running{")) == {
        "prefill-1", "decode-1", "decode-2",
    }  # fmt: skip


def outcome(client) -> str:
    """Ask for a long streamed answer and return how that ended."""
    try:
        for _ in complete(client, SLOW, max_tokens=61, stream=True):
            pass
    except openai.APIError as error:
        return type(error).__name__
    return "whole"


@pytest.mark.faults
@pytest.mark.parametrize(("gpu", "name"), first([("GPU-c", "decode"), ("GPU-a", "prefill")]))
def test_an_engine_that_is_killed_under_load_ends_all_with_clean_errors_and_they_start_anew(
    start, spec, gpu, name
):
    with start(f"split-killed-{name}", spec) as endpoint, ThreadPoolExecutor(6) as pool:
        client, first = endpoint.client(), engines_of(endpoint)
        asked = [pool.submit(outcome, client) for _ in range(6)]
        until(lambda: sum(labelled(endpoint, "vllm:num_requests_running{").values()) >= 4, "load")
        first[gpu].kill()

        ends = [each.result(timeout=600) for each in asked]
        until(lambda: endpoint.get("/health").status_code == 503, "nobody noticed")
        until(lambda: endpoint.get("/health").status_code == 200, "no restart")

        assert set(ends) <= {"APIError", "InternalServerError", "whole"}, ends
        assert "APIError" in ends
        again = engines_of(endpoint)
        assert not {each.pid for each in again.values()} & {each.pid for each in first.values()}
        assert complete(client, "and on", max_tokens=2).choices[0].text == "and on"
        assert [each["name"] for each in endpoint.said("phase")].count("Serving") == 2


@pytest.mark.faults
def test_a_client_that_goes_while_its_prompt_is_read_frees_its_place(start, spec):
    with start("split-gone", spec) as endpoint:
        url, headers = f"{endpoint.address()}/v1/completions", {"Authorization": f"Bearer {KEY}"}
        reader = engines_of(endpoint)["GPU-a"]
        reader.suspend()
        body = {"model": "model", "prompt": "a b", "max_tokens": 4}
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(url, json=body, headers=headers, timeout=0.5)
        reader.resume()

        until(lambda: endpoint.figure("slipway_requests_cancelled_total") == 1, "still waited for")
        assert complete(endpoint.client(), "and on", max_tokens=2).choices[0].text == "and on"


@pytest.mark.soak  # test_relayed.py has the same of one engine
@pytest.mark.faults
def test_engines_that_end_again_and_again_end_the_job_by_name(start, spec):
    with start("split-lost", spec) as endpoint:
        ended = kill_until_given_up(endpoint)

    assert "ENGINE_LOST: vLLM's" in ended.stderr


@pytest.mark.parametrize("how", first(["stop", "idle"]))
def test_a_stop_ends_every_engine(start, spec, how):
    changed = spec.model_copy(update={"idle_stop_seconds": 1.0 if how == "idle" else None})
    with start(f"split-{how}", changed) as endpoint:
        complete(endpoint.client(), "a b", max_tokens=2)
        engines = engines_of(endpoint)
        if how == "stop":
            endpoint.process.send_signal(signal.SIGTERM)
        ended = endpoint.end()

    assert len(engines) == 3
    assert ended.returncode == (-signal.SIGTERM if how == "stop" else 0), ended.stderr
    assert not any(psutil.pid_exists(each.pid) for each in engines.values())


def test_one_that_does_not_start_ends_the_others_and_is_the_jobs_reason(start, spec):
    began = time.monotonic()
    with start("split-broken", spec, VLLM_OPTIONS="host port") as endpoint:
        ended = endpoint.end()

    assert ended.returncode == 3
    # All three refuse at once: who is seen first is chance.
    assert re.search(r"engine [12] does not start with this model: error: ", ended.stderr)
    assert time.monotonic() - began < 100


def test_engines_that_cannot_hand_a_cache_over_say_so_before_anybody_asks(start, spec):
    with start("split-apart", spec, STANDIN_HANDS_NOTHING_OVER="1") as endpoint:
        ended = endpoint.end()

    assert ended.returncode == 3
    assert "vLLM's decode engine 1 does not fetch what vLLM's prefill engine 1" in ended.stderr
    assert "no way to that memory" in ended.stderr
    assert not ended.bodies("endpoint")


def test_fewer_gpus_than_the_engines_take_are_refused_with_both_numbers(start, spec):
    with start("split-few", spec, CUDA_VISIBLE_DEVICES="GPU-a,GPU-b") as endpoint:
        ended = endpoint.end()

    assert ended.returncode == 3
    assert "its engines take 3 GPUs, and the job was given 2" in ended.stderr


def test_gpus_are_dealt_out_in_order_each_to_one_engine():
    split = PhaseSplit(prefill_engines=2, decode_engines=1)
    options = EngineOptions(tensor_parallel_size=2, split=split)

    found = split_engines(split, options, {"CUDA_VISIBLE_DEVICES": "u, v,w,x,y,z"})

    assert [(each.phase, each.number, each.devices) for each in found] == [
        ("prefill", 1, ("u", "v")),
        ("prefill", 2, ("w", "x")),
        ("decode", 1, ("y", "z")),
    ]
    assert [each.devices for each in split_engines(split, options, {})][-1] == ("4", "5")
    with pytest.raises(BadInputError, match="take 6 GPUs, and the job was given 1"):
        split_engines(split, options, {"CUDA_VISIBLE_DEVICES": "7"})


def test_who_reads_is_asked_for_the_same_prompt_and_nothing_of_the_answer():
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0.5,
            "stream": True, "stream_options": {"include_usage": True}, "min_tokens": 4,
            "max_completion_tokens": 9}  # fmt: skip
    path = "/v1/chat/completions"

    found = prefill_body(chat)

    assert found["messages"] == chat["messages"]
    assert (found["max_tokens"], found["stream"], found["temperature"]) == (1, False, 0.5)
    assert found["kv_transfer_params"]["do_remote_decode"]
    assert not {"stream_options", "min_tokens", "max_completion_tokens"} & set(found)
    one, many = chat | {"max_completion_tokens": 1}, chat | {"n": 2}
    asked = [
        is_prefilled_elsewhere(parse_request(path, json.dumps(each).encode(), "vllm"))
        for each in (chat, one, many)
    ]
    assert asked == [True, False, False]
