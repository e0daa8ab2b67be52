"""A spec in SGLang's words, held to its own options; its server's stand-in behind our door."""

import argparse
import importlib
import importlib.util
import json

import pytest

from runners.jobs.runtime import BadInputError
from runners.jobs.serve.figures import Figures
from runners.jobs.serve.relayed.backend import Placed
from runners.jobs.serve.relayed.process import PLAIN_LINES, ListenAddress
from runners.jobs.serve.relayed.scrape import Scraper
from runners.jobs.serve.sglang.speaker import Sglang, arguments
from tests.runners.jobs.serve.speaking import (
    ALL,
    place,
    spec_of,
    unknown,
    values,
)


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
