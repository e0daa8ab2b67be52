"""Further arguments of an engine, against the lists of the releases that its environments pin."""

import re
import shlex

import pytest

from runners.environments.builder import SHIPPED, read_pins
from runners.environments.read_engine_args import help_options
from runners.jobs.runtime import BadInputError
from runners.jobs.serve.relayed.backend import checked
from runners.jobspec import FolderModel, ServeSpec
from runners.jobspec.engine_args import (
    EngineArgsError,
    arguments_of,
    check_engine_args,
    engines_with_arguments,
    usable_args,
)
from runners.jobspec.engines import ENGINES, OWN
from runners.jobspec.serve import EngineOptions, NamedAdapter, PhaseSplit
from runners.shared.engine_commands import shown_command

TAKEN = (
    ("vllm", "--enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3"),
    ("vllm", "--enable_auto_tool_choice"),  # its parser takes both
    ("vllm", "--stream-interval=4 --no-async-scheduling"),
    ("vllm", "--compilation-config.mode 3"),
    ("vllm", "-cc.mode=3"),
    ("vllm", """--limit-mm-per-prompt '{"image": 2}'"""),
    ("vllm", "--cudagraph-capture-sizes 1 2 4"),
    ("sglang", "--tool-call-parser qwen25 --schedule-policy lpm --attention-backend triton"),
    ("llamacpp", "-b 64 -ub 32 -fa on --cache-type-k q8_0 --no-warmup --temp 0.5"),
    ("llamacpp", "-ot exps=CPU"),
)
REFUSED = (  # with what the refusal says
    ("vllm", "--tool-call-parsr hermes", "vLLM 0.32.0; the nearest is --tool-call-parser"),
    ("vllm", "--api-ke x", "no argument of vLLM"),  # no abbreviations: nothing slips through
    ("vllm", "hermes", "belongs to no flag"),
    ("vllm", "-- --port 1", "no argument of vLLM"),
    ("vllm", "--stream-interval", "takes one value, and 0 are given"),
    ("vllm", "--stream-interval 4 5", "takes one value, and 2 are given: 4 5"),
    ("vllm", "--stream-interval x", "takes a whole number"),
    ("vllm", "--async-scheduling yes", "takes no value"),
    ("vllm", "--cudagraph-capture-sizes", "at least one value"),
    ("vllm", "--tool-strict-level 9", "choose "),
    ("vllm", "--limit-mm-per-prompt image", "a JSON object"),
    ("vllm", "-tp 2", "set by pins.tensor_parallel_size"),
    ("vllm", "--max_model_len 4096", "set by workload.input_tokens"),
    ("vllm", "--no-enable-prefix-caching", "set by launch.prefix_caching"),
    ("vllm", "--port 80", "set by Slipway|not allowed: it changes who can reach"),
    ("vllm", "--api-key x", "it changes who can reach"),
    ("vllm", "--ssl-keyfile k", "it changes who can reach"),
    ("vllm", "--trust-remote-code", "it runs code"),
    ("vllm", "--middleware a.b", "it runs code"),
    ("vllm", "--tool-parser-plugin p", "it runs code"),
    ("vllm", "--structured-outputs-config.reasoning_parser_plugin p", "it runs code"),
    ("vllm", "--allowed-local-media-path x", "files of the host"),
    ("vllm", "--download-dir x", "files of the host"),
    ("vllm", "--log-config-file x", "files of the host"),
    ("vllm", "--chat-template x.jinja", "set by the file chat_template.jinja"),
    ("vllm", """--compilation-config '{"cache_dir": "x"}'""", "not allowed to set cache_dir"),
    ("vllm", """--additional-config '{"a": ["/etc/passwd"]}'""", "name /etc/passwd"),
    ("vllm", """--additional-config '{"a": "http://b"}'""", "name http://b"),
    ("vllm", """--hf-overrides '{"auto_map": {"AutoModel": "e.M"}}'""", "Python code"),
    ("vllm", "--response-role ../x", "name ../x"),
    ("vllm", "--data-parallel-address a", "to other machines|takes data from other|devices"),
    ("sglang", "--tp-size 2", "set by pins.tensor_parallel_size"),
    ("sglang", "--schedule-policy zz", "choose lpm"),
    ("sglang", "--enable-custom-logit-processor", "it runs code"),
    ("sglang", "--sidecar-args x", "it runs code"),
    ("sglang", "--disaggregation-mode prefill", "other machines"),
    ("llamacpp", "-m x", "set by model"),
    ("llamacpp", "--batch-size=64", "without “=”"),
    ("llamacpp", "-ctk q9", "choose f32"),
    ("llamacpp", "--tools all", "it runs code"),
    ("llamacpp", "--slot-save-path x", "files of the host"),
    ("llamacpp", "--hf-repo a/b", "other machines"),
    ("llamacpp", "--help", "it prints something and ends"),
    (OWN, "--foo", "takes no engine_args"),
)


def test_flags_that_a_release_has_are_taken():
    for engine, line in TAKEN:
        assert usable_args(engine, words := shlex.split(line)) == tuple(words), line


def test_a_refused_flag_is_named_with_the_reason():
    for engine, line, said in REFUSED:
        with pytest.raises(EngineArgsError) as refusal:
            check_engine_args(engine, shlex.split(line))
        assert re.search(said, str(refusal.value)), (line, str(refusal.value))


def test_every_list_is_of_the_pinned_release_and_has_each_name_once():
    packages = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "xllamacpp"}
    assert set(engines_with_arguments()) == set(packages)
    for engine, package in packages.items():
        known = arguments_of(engine)
        assert f"{package}=={known.release}" in read_pins(SHIPPED / f"{engine}.txt").packages
        names = [name for each in known.options for name in each.names]
        assert len(names) == len(set(names)), engine


# Words of a name that say a file, an address, a secret or code; those of SAFE do not.
UNSAFE = re.compile(
    r"(^|-)(path|dir|file|folder|urls?|api-key|hf-token|plugin|cls|host|ports?|addr|ssl|cors|hooks)(-|$)"
)
SAFE = frozenset({
    "--max-lora-cls-labels", "--media-url-max-file-size-mb", "--hicache-host-memory-fraction",
})  # fmt: skip


def test_no_option_with_an_unsafe_name_can_be_given():
    for engine in engines_with_arguments():
        for option in arguments_of(engine).options:
            if any(map(UNSAFE.search, option.slugs)) and not SAFE & set(option.names):
                for count in range(3):
                    words = [option.names[0], *(["1"] * count)]
                    assert usable_args(engine, words) == (), words


def test_another_release_on_the_host_is_refused_before_the_start(monkeypatch):
    spec = ServeSpec(
        model=FolderModel(path="m"), engine="vllm", engine_args=("--async-scheduling",)
    )
    module = "runners.jobs.serve.relayed.backend.version"
    for release, is_taken in (("0.32.0", True), ("0.32.0+cpu", True), ("0.33.0", False)):
        monkeypatch.setattr(module, lambda _package, found=release: found)
        if is_taken:
            assert checked(spec) is spec
        else:
            with pytest.raises(BadInputError, match=r"vLLM 0\.33\.0 is installed here"):
                checked(spec)


def test_the_help_of_llama_cpp_is_read_with_wrapped_lines_and_without_removed_options():
    text = """----- common params -----

-b,    --batch-size N                   logical maximum batch size (default: 2048)
                                        (env: LLAMA_ARG_BATCH)
-ctk,  --cache-type-k TYPE              KV cache data type for K
                                        allowed values: f32, f16
                                        (default: f16)
--cors-credentials, --no-cors-credentials
                                        whether to allow credentials
--draft, --draft-max N                  the argument has been removed. use another
--control-vector-layer-range START END
                                        layer range
"""
    assert list(help_options(text.splitlines())) == [
        {"names": ["-b", "--batch-size"], "values": 1, "accepts": ["int"], "default": "2048"},
        {
            "names": ["-ctk", "--cache-type-k"], "values": 1, "choices": ["f32", "f16"],
            "default": "f16",
        },
        {"names": ["--cors-credentials", "--no-cors-credentials"]},
        {"names": ["--control-vector-layer-range"], "values": 2, "accepts": ["text"]},
    ]  # fmt: skip


def test_a_shown_command_has_the_arguments_and_names_for_what_the_host_fills_in():
    fields = {"model": FolderModel(path="m"), "served_name": "ours", "max_length": 64}
    lora = NamedAdapter(name="a", adapter=FolderModel(path="a"))
    for engine, given, parts in (
        ("vllm", {"engine_args": ("--tool-call-parser", "hermes")}, ("serve MODEL_FOLDER", "--tool-call-parser hermes", "--port PORT")),
        ("vllm", {"weight_dtype": "fp8"}, ("--quantization fp8",)),
        ("vllm", {"adapters": (lora,)}, ("--max-lora-rank RANK", "ADAPTER_FOLDER_1")),
        ("vllm", {"engine_options": EngineOptions(split=PhaseSplit())}, ("kv_producer", "kv_consumer")),
        ("sglang", {"engine_args": ("--stream-interval", "4")}, ("--model-path MODEL_FOLDER", "--stream-interval 4")),
        ("llamacpp", {"engine_args": ("-b", "64")}, ("llama-server --model MODEL.gguf", "--parallel 16 --ctx-size 1024", "-b 64")),
    ):  # fmt: skip
        command = shown_command(ServeSpec(engine=engine, **fields, **given))
        assert all(part in command for part in parts), command
        assert "key" not in command
    assert shown_command(ServeSpec(**fields)) == ""
    assert ENGINES[OWN].environment is None
