"""A spec in SGLang's words, held to its own options; its server's stand-in behind our door."""

import argparse
import importlib
import importlib.util
import json

import httpx
import openai
import pytest

from runners.endpoint_spec import key_hash
from runners.jobs.runtime import BadInputError
from runners.jobs.serve.figures import Figures
from runners.jobs.serve.relayed.backend import Placed
from runners.jobs.serve.relayed.folders import PLAIN_LINES
from runners.jobs.serve.relayed.process import ListenAddress
from runners.jobs.serve.relayed.scrape import Scraper
from runners.jobs.serve.sglang.speaker import Sglang, arguments
from runners.jobspec import FolderModel, NamedAdapter, ServeSpec
from tests.runners.jobs.adapter_making import make_all
from tests.runners.jobs.serve.speaking import (
    ALL,
    STANDIN,
    place,
    recorded_options,
    spec_of,
    unknown,
    values,
)
from tests.system.jobs.harness import PROJECT
from tests.system.jobs.serve.serving import KEY, complete, engine_of, serving_by, until

MODULE = "runners.jobs.serve.sglang"
ENV = {
    "PYTHONPATH": f"{PROJECT}:{STANDIN}",
    "SGLANG_OPTIONS": " ".join(sorted(recorded_options("sglang"))),
}


@pytest.fixture
def placed(tmp_path) -> Placed:
    return place(tmp_path)


def test_everything_that_a_spec_can_say_stands_in_the_arguments(placed):
    fields = {"max_length": 2048, "weight_dtype": "fp8", "max_concurrency": 8}
    spec = spec_of("sglang", engine_options=ALL, **fields)

    found = values(arguments(spec, placed, 8001))

    assert (found["--port"], found["--host"]) == ("8001", "127.0.0.1")
    assert (found["--tp-size"], found["--pp-size"]) == ("4", "2")  # experts over all four
    assert (found["--attn-dp-size"], found["--ep-size"], "--dp-size" in found) == ("2", "4", False)
    assert (found["--quantization"], found["--kv-cache-dtype"]) == ("fp8", "fp8_e4m3")
    assert (found["--context-length"], found["--mem-fraction-static"]) == ("2048", "0.85")
    assert (found["--chunked-prefill-size"], found["--max-running-requests"]) == ("-1", "8")
    assert (found["--max-loras-per-batch"], "--disable-radix-cache" in found) == ("3", False)
    assert json.loads(found["--lora-paths"])["lora_name"] == "first"
    assert (found["--speculative-num-steps"], found["--speculative-algorithm"]) == (
        "3",
        "STANDALONE",
    )
    assert found["--chat-template"] == PLAIN_LINES


def test_replicas_without_shared_experts_are_told_apart_and_the_cache_can_be_left_out(placed):
    changes = {"has_expert_parallel": False, "has_prefix_cache": False, "memory_ratio": 0.97}
    options = ALL.model_copy(update={**changes, "has_chunked_prefill": True, "draft": None})

    argv = arguments(spec_of("sglang", engine_options=options), placed, 1)

    found = values(argv)
    assert (found["--tp-size"], found["--dp-size"]) == ("2", "2")
    assert not {"--ep-size", "--attn-dp-size", "--speculative-algorithm"} & set(argv)
    assert "--disable-radix-cache" in argv
    assert found["--mem-fraction-static"] == "0.88"  # activations and graphs take the rest


def test_only_options_that_its_parser_has_are_used(placed):
    bare = ALL.model_copy(update={"has_expert_parallel": False, "has_prefix_cache": False})
    for options in (ALL, bare, None):
        argv = arguments(spec_of("sglang", engine_options=options, max_length=64), placed, 1)

        assert unknown(argv, "sglang") == []


def test_its_own_parser_takes_the_arguments(placed):
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("sglang is not installed here")
    parser = argparse.ArgumentParser()
    importlib.import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    spec = spec_of("sglang", engine_options=ALL, max_length=2048, weight_dtype="fp8")

    found = parser.parse_args([*arguments(spec, placed, 8001), "--api-key", "secret"])

    assert (found.tp_size, found.attn_dp_size, found.ep_size) == (4, 2, 4)
    assert [each["lora_name"] for each in found.lora_paths] == ["first", "second"]
    assert (found.random_seed, found.context_length, found.api_key) == (17, 2048, "secret")


def test_an_adapter_is_asked_for_as_the_bases_and_the_key_is_no_argument(placed):
    spec, engine = spec_of("sglang"), Sglang()

    command = engine.command(spec, placed, ListenAddress(8001, "secret"))

    assert (engine.called(spec, "first"), engine.called(spec, "ours")) == ("ours:first", "ours")
    assert not any("secret" in word for word in command.argv)
    assert "secret" in command.env.values()


@pytest.mark.parametrize(
    ("config", "dtype", "words"),
    [
        ({}, "int4", "weight_dtype is int4, and SGLang makes no 4-bit weights .* choose fp8"),
        ({}, "int8", "weight_dtype is int8, and SGLang makes no 8-bit weights"),
        (
            {"quantization_config": {"quant_method": "qmoe"}},
            "bf16",
            "quant_method is qmoe, which ",
        ),
    ],
)
def test_weights_that_it_does_not_load_are_refused_by_name(placed, config, dtype, words):
    with pytest.raises(BadInputError, match=words):
        arguments(spec_of("sglang", weight_dtype=dtype), placed._replace(config=config), 1)


def test_its_figures_are_read_into_the_charts():
    figures = Figures()
    page = "\n".join(
        f'{name}{{model_name="m",tp_rank="0"}} {value}'
        for name, value in zip(Sglang.names, (3.0, 2.0, 0.5, 100.0, 30.0, 0.0, 0.0), strict=True)
    )

    assert Scraper(Sglang.names, figures).take(page, 1.0)
    found = figures.since_last(1.0)

    assert (found["running_requests"], found["waiting_requests"]) == (3.0, 2.0)
    assert (found["kv_cache_used_ratio"], found["tokens_per_second"]) == (0.5, 30.0)


# Its server's stand-in, as a process of its own behind our door


@pytest.fixture(scope="module")
def endpoint(host, trained_model, base):
    make_all(base, host.path / "models" / "for-sglang", {"one": {}})
    adapter = NamedAdapter(name="one", adapter=FolderModel(path="for-sglang/one"))
    spec = ServeSpec(
        model=trained_model, engine="sglang", max_concurrency=4, max_length=64,
        adapters=(adapter,), key_hashes=(key_hash(KEY),),
    )  # fmt: skip
    with serving_by(host, MODULE, "sglang", spec, ENV) as found:
        found.address()
        yield found


def test_an_answer_comes_back_whole_and_streamed_and_an_adapters_by_its_name(endpoint):
    client = endpoint.client()

    whole = complete(client, "one two three")
    chunks = list(complete(client, "one two three", stream=True))
    adapted = complete(client, "four", model="one")

    assert (whole.model, whole.choices[0].text) == ("model", "one two three")
    assert "".join(each.choices[0].text for each in chunks).split() == ["one", "two", "three"]
    assert adapted.model == "model:one"
    until(lambda: endpoint.figure("slipway_output_tokens_total") >= 7, "tokens are not counted")
    with pytest.raises(openai.NotFoundError):
        complete(client, model="model:one")


def test_what_it_refuses_comes_back_in_our_form_and_nobody_else_has_its_key(endpoint):
    engine = engine_of(endpoint)
    (port,) = [each.laddr.port for each in engine.net_connections("tcp") if not each.raddr]

    with pytest.raises(openai.BadRequestError) as caught:
        complete(endpoint.client(), "this is too long")
    behind = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "a"})

    assert caught.value.code == "context_length_exceeded"
    assert behind.status_code == 401
    assert "--api-key" not in engine.cmdline()
    assert "--served-model-name" in engine.cmdline()


def test_what_it_says_when_it_does_not_start_is_the_jobs_reason(host, trained_model):
    broken = ENV | {"SGLANG_OPTIONS": "host port"}
    spec = ServeSpec(model=trained_model, engine="sglang", key_hashes=(key_hash(KEY),))

    with serving_by(host, MODULE, "sglang-broken", spec, broken) as endpoint:
        ended = endpoint.end()

    assert ended.returncode == 3
    assert "SGLang does not start with this model: error: " in ended.stderr
