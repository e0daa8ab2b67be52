"""llama.cpp behind our door: the official client, keys, figures, kills under load, bad files."""

import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import torch

from runners.jobs.loading import load_folder, load_tokenizer
from runners.jobspec import FolderModel, ServeSpec
from runners.jobspec.serve import key_hash
from runners.shared.reasons import Reason
from runners.supervision.classification import Ending, classify
from tests.system.jobs.serve.gguf import build_environment, write_model
from tests.system.jobs.serve.serving import (
    KEY,
    PROMPT,
    complete,
    engine_of,
    kill_until_given_up,
    outcome,
    serving,
    until,
)

pytestmark = pytest.mark.slow
LONG = {"prompt": [1, 2, 3], "max_tokens": 55, "n": 2}


@pytest.fixture(scope="module")
def gguf(host, trained_model) -> FolderModel:
    build_environment(host.path)
    source = host.path / "attempts" / trained_model.attempt_id / "output" / "model"
    write_model(source, host.path / "models" / "tiny-gguf")
    return FolderModel(path=str(host.path / "models" / "tiny-gguf"))


@pytest.fixture(scope="module")
def spec(gguf) -> ServeSpec:
    return ServeSpec(
        model=gguf, engine="llamacpp", max_concurrency=4, key_hashes=(key_hash(KEY),),
        engine_args=("--batch-size", "64", "--cache-type-k", "bf16", "--flash-attn", "on"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def llama(host, spec):
    with serving(host, "serve-llamacpp", spec, KEY) as found:
        found.address()
        yield found


@pytest.fixture(scope="module")
def client(llama) -> openai.OpenAI:
    return llama.client()


def test_the_job_runs_in_its_environment_and_not_in_the_agents(llama):
    running = psutil.Process(llama.process.pid)

    assert "/environments/llamacpp/" in running.cmdline()[0]
    assert not any("torch" in each.path for each in running.memory_maps())


def test_the_command_that_ran_is_reported_with_the_further_arguments_and_no_key(llama):
    llama.address()
    (body,) = llama.said("endpoint")

    assert body["command"].startswith("llama-server --model ")
    assert "--parallel 4 --ctx-size 256" in body["command"]
    assert body["command"].endswith("--batch-size 64 --cache-type-k bf16 --flash-attn on")
    assert KEY not in body["command"]


def test_arguments_that_a_release_does_not_have_end_the_job_by_their_name(host, spec):
    wrong = spec.model_copy(update={"engine_args": ("--batch-siez", "64")})
    with serving(host, "serve-wrong-argument", wrong, KEY) as found:
        _, errors = found.process.communicate(timeout=300)
    assert "--batch-siez is no argument of llama.cpp" in errors
    assert "the nearest is --batch-size" in errors


def test_the_likeliest_token_is_as_likely_as_plain_transformers_says(host, trained_model, client):
    folder = host.path / "attempts" / trained_model.attempt_id / "output" / "model"
    model, tokenizer = load_folder(folder, "fp32", torch.device("cpu")), load_tokenizer(folder)
    logits = model(**tokenizer(PROMPT, return_tensors="pt")).logits[0, -1]

    found = complete(client, max_tokens=1, logprobs=1)

    best = float(torch.log_softmax(logits, dim=-1).max())
    assert found.choices[0].logprobs.token_logprobs[0] == pytest.approx(best, abs=0.05)


def test_the_model_is_listed_with_its_length(client):
    (model,) = client.models.list().data

    assert (model.id, model.max_model_len) == ("model", 64)


def test_a_conversation_without_a_template_is_read_as_plain_lines(client):
    asked = {"model": "model", "temperature": 0, "max_completion_tokens": 12, "stream": True}
    messages = [{"role": "user", "content": "def"}]

    chunks = list(
        client.chat.completions.create(
            **asked, messages=messages, stream_options={"include_usage": True}
        )
    )

    plain = complete(client, "user: def\nassistant:", max_tokens=1)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason in ("stop", "length")
    assert chunks[-1].usage.prompt_tokens == plain.usage.prompt_tokens
    assert 1 <= chunks[-1].usage.completion_tokens <= 12


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_never_in_the_text(client, stream):
    whole = complete(client, max_tokens=20).choices[0].text

    found = complete(client, max_tokens=20, stop=[whole[3]], stream=stream)

    chunks = list(found) if stream else [found]
    assert whole[3] not in "".join(chunk.choices[0].text for chunk in chunks)


def test_logprobs_tell_each_token_with_its_alternatives(client):
    found = complete(client, logprobs=3)

    logprobs = found.choices[0].logprobs
    assert logprobs.text_offset[0] == 0
    assert len(logprobs.tokens) == len(logprobs.top_logprobs) <= found.usage.completion_tokens
    assert all(1 <= len(top) <= 3 for top in logprobs.top_logprobs)
    assert logprobs.token_logprobs[0] == pytest.approx(max(logprobs.top_logprobs[0].values()))


def test_a_bias_decides_which_token_is_written(client):
    written = [
        complete(client, max_tokens=3, logprobs=0, logit_bias={token: 100}).choices[0].text
        for token in ("70", "71")
    ]

    assert written[0] != written[1]
    assert all(text == text[:1] * 3 for text in written)


def test_a_message_is_answered_whole_and_streamed_with_the_same_text(llama):
    asked = {"model": "model", "max_tokens": 8, "temperature": 0, "stream": False}
    asked |= {"messages": [{"role": "user", "content": "def"}]}
    url, headers = f"{llama.address()}/v1/messages", {"x-api-key": KEY}

    whole = httpx.post(url, json=asked, headers=headers, timeout=300).json()
    stream = httpx.post(url, json=asked | {"stream": True}, headers=headers, timeout=300).text
    events = [json.loads(each.split("data: ")[1]) for each in stream.split("\n\n")[:-1]]

    assert whole["content"][0]["text"] == "".join(
        each["delta"]["text"] for each in events if each["type"] == "content_block_delta"
    )
    first, again = (
        (used["input_tokens"] + used["cache_read_input_tokens"], used["output_tokens"])
        for used in (whole["usage"], events[-2]["usage"])
    )
    assert first == again  # the second prompt was in the slot's cache
    assert events[-2]["usage"]["cache_read_input_tokens"] > 0
    assert whole["stop_reason"] == events[-2]["delta"]["stop_reason"]


def test_a_key_is_needed_at_the_door_and_at_the_engine_behind_it(llama):
    (port,) = [
        each.laddr.port for each in engine_of(llama).net_connections("tcp") if not each.raddr
    ]

    with pytest.raises(openai.AuthenticationError):
        complete(llama.client("wrong"))
    behind = httpx.post(f"http://127.0.0.1:{port}/completion", json={"prompt": "a"})
    assert behind.status_code == 401


@pytest.mark.parametrize(
    ("changes", "param"),
    [({"prompt": [100_000]}, "prompt"), ({"max_tokens": 65}, "prompt"), ({"n": 99}, "n")],
)
def test_a_bad_request_is_refused_by_the_field_as_with_our_own_engine(client, changes, param):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, **changes)

    assert caught.value.param == param


def test_sixty_four_clients_are_answered_and_counted_by_our_names(llama, client):
    before = llama.figure("slipway_requests_requests_total")

    with ThreadPoolExecutor(64) as pool:
        found = list(pool.map(lambda _: outcome(client, **LONG), range(64)))

    assert set(found) <= {"stop", "length"}
    assert llama.figure("slipway_requests_requests_total") - before == 128
    assert llama.figure("slipway_ttft_seconds_count") >= 128
    assert llama.figure("slipway_tpot_seconds_count") > 128
    assert llama.figure("slipway_running_requests") == 0


def test_a_client_that_goes_frees_its_place(llama):
    with (
        llama.client()
        .with_options(timeout=60.0)
        .completions.with_streaming_response.create(
            model="model", prompt=PROMPT, max_tokens=55, stream=True
        )
    ):
        pass

    until(lambda: llama.figure("slipway_running_requests") == 0, "a place is still taken")


@pytest.mark.faults
def test_a_killed_engine_gives_clean_errors_and_is_started_again(host, spec):
    with (
        serving(host, "serve-llama-killed", spec, KEY) as endpoint,
        ThreadPoolExecutor(16) as pool,
    ):
        client = endpoint.client()
        first = engine_of(endpoint)
        first.send_signal(signal.SIGSTOP)  # so that all of them are under way
        asked = [pool.submit(outcome, client, **LONG) for _ in range(16)]
        until(lambda: endpoint.figure("slipway_waiting_requests") == 28, "there is no load")
        first.kill()

        ends = [each.result(timeout=600) for each in asked]
        until(lambda: httpx.get(f"{endpoint.address()}/health").status_code == 200, "no restart")

        assert set(ends) == {"InternalServerError"}, ends
        assert complete(client).choices[0].finish_reason
        assert engine_of(endpoint).pid != first.pid
        assert [each["name"] for each in endpoint.said("phase")].count("Serving") == 2


@pytest.mark.faults
def test_an_engine_that_ends_again_and_again_ends_the_job_by_name(host, spec):
    with serving(host, "serve-llama-lost", spec, KEY) as endpoint:
        ended = kill_until_given_up(endpoint)

    assert classify(Ending(ended.returncode, None, ended.stderr)) is Reason.ENGINE_LOST
    assert "ended by SIGKILL" in ended.stderr


def test_it_stops_when_nobody_asks_and_leaves_its_figures(host, spec):
    idle = spec.model_copy(update={"idle_stop_seconds": 1.0})
    with serving(host, "serve-llama-idle", idle, KEY) as endpoint:
        ended = endpoint.end()

    (result,) = ended.bodies("result")
    assert (ended.returncode, result["notes"]["engine"]) == (0, "llamacpp")
    assert result["notes"]["ended"].startswith("idle")
    assert result["measured"]["peak_memory_bytes"] > 10_000_000


def test_a_stop_finishes_what_was_asked_and_leaves_no_process(host, spec):
    with serving(host, "serve-llama-stopped", spec, KEY) as endpoint:
        complete(endpoint.client())
        engine = engine_of(endpoint)
        endpoint.process.send_signal(signal.SIGTERM)
        ended = endpoint.end()

    assert ended.returncode == -signal.SIGTERM
    assert not psutil.pid_exists(engine.pid)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: os.truncate(path, 100_000), "BAD_INPUT: llama.cpp does not open model.gguf"),
        (Path.unlink, "holds no .gguf file"),
    ],
)
def test_a_damaged_or_missing_file_is_refused_by_name(host, gguf, spec, tmp_path, damage, words):
    source = Path(gguf.path)
    (folder := host.path / "models" / tmp_path.name).mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    damage(folder / "model.gguf")

    broken = spec.model_copy(update={"model": FolderModel(path=str(folder))})
    ended = host.run(f"serve-{tmp_path.name}", broken)

    assert ended.returncode == 3
    assert words in ended.stderr


def test_a_template_that_cannot_render_ends_the_job_in_its_own_words(host, base, spec):
    source, folder = host.path / "templated", host.path / "models" / "templated-gguf"
    shutil.copytree(base, source)
    (source / "chat_template.jinja").write_text("{{ raise_exception('no chat here') }}")
    write_model(source, folder)

    templated = spec.model_copy(update={"model": FolderModel(path=str(folder))})
    ended = host.run("serve-templated", templated)

    assert ended.returncode == 3
    assert "BAD_INPUT: llama.cpp does not start with the chat template" in ended.stderr
    assert "no chat here; mend chat_template" in ended.stderr
