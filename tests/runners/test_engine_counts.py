"""What engines count themselves: transformers for real, llama.cpp by its recorded output."""

import json
import os
import shlex

import pytest

from runners.environments.builder import Store
from runners.host import preflight_weights
from runners.host.preflight_weights import (
    EngineCount,
    EngineNeeds,
    FolderQuery,
    checks,
    compare_counts,
    interpreter,
    llama_count,
    memory_in,
)
from runners.jobs.folder_query import counts, device_memory, fitted_arguments
from runners.jobs.runtime import BadInputError
from runners.jobspec import FolderModel, ServeSpec
from runners.jobspec.engines import ENGINES
from runners.shared.config import HostDir
from runners.shared.messages import RunRequest
from tests.runners.test_stored_weights import CONFIG

LLAMA_PARAMETERS = 2 * 36_992 + 2 * 512 * 64 + 64
GIB = 2**30

# llama-fit-params of build 6895 on an RTX 4090, shortened to two of its tensors:
# https://github.com/ggml-org/llama.cpp/blob/master/tools/fit-params/README.md
FITTED = r"""
Printing fitted CLI arguments to stdout...
-c 4096 -ngl 48 -ot blk\.14\.ffn_(up|down|gate)_(ch|)exps=CPU,blk\.15\.ffn_(up|down|gate)_(ch|)exps=CPU
"""
# https://github.com/ggml-org/llama.cpp/pull/18844
UNCHANGED = "-c 0 -ngl -1\n"
# gemma-3-4b-it in 16 bits on a Mac: https://github.com/ggml-org/llama.cpp/pull/22171
ESTIMATED = "MTL0 7401 814 517 \nhost 1280 0 154 \n"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "models" / "model"
    path.mkdir(parents=True)
    return path


def query_of(folder, context_tokens: int = 0) -> FolderQuery:
    return FolderQuery(folder, (folder.parent,), folder.parent.parent, context_tokens)


@pytest.mark.slow
def test_preflight_shows_what_transformers_builds(folder, monkeypatch):
    monkeypatch.setattr(preflight_weights, "ENGINE_SECONDS", 300.0)
    code = {"auto_map": {"AutoModelForCausalLM": "own.Model"}}  # never imported
    (folder / "config.json").write_text(json.dumps(CONFIG | code))
    (folder / "model.safetensors").write_bytes(b"")
    (check,) = checks(EngineNeeds("main", 0, is_login_node=False), query_of(folder))
    assert check.ok
    assert f"builds {LLAMA_PARAMETERS:,} parameters" in check.sentence
    assert check.sentence.endswith("0.00 GiB in float16.")
    assert check.figures["engine_bytes"] == 2 * LLAMA_PARAMETERS == check.figures["counted_bytes"]


def test_parameters_are_counted_by_dtype_and_class():
    tied = {"tie_word_embeddings": True, "torch_dtype": "float32"}
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    bert = {
        "model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 9,
        "max_position_embeddings": 4, "type_vocab_size": 2, "num_labels": 2,
    }  # fmt: skip
    embedding, layer = (9 + 4 + 2 + 2) * 8, 4 * (64 + 8) + 2 * 8 * 16 + 16 + 8 + 4 * 8
    pooled_and_classified = 64 + 8 + 2 * 8 + 2
    cases = [
        (CONFIG, LLAMA_PARAMETERS, {"float16": 2 * LLAMA_PARAMETERS}, False),
        (CONFIG | tied, LLAMA_PARAMETERS - 512 * 64, None, False),
        (CONFIG | quantised, LLAMA_PARAMETERS, None, True),
        (bert, embedding + layer + pooled_and_classified, None, False),
    ]
    for config, parameters, by_dtype, is_quantised in cases:
        found = counts(dict(config))
        assert (found["parameters"], found["is_quantised"]) == (parameters, is_quantised), config
        assert by_dtype in (None, found["bytes_by_dtype"])


@pytest.mark.slow
def test_a_model_that_transformers_does_not_know_is_named(folder, monkeypatch):
    monkeypatch.setattr(preflight_weights, "ENGINE_SECONDS", 300.0)
    (folder / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    python = interpreter("main", Store(HostDir(folder.parent.parent)))
    sentence = preflight_weights.transformers_count(query_of(folder), python).sentence
    assert "does not build its config.json: ValueError: " in sentence
    assert "no-such-model" in sentence


def test_environments_without_transformers_are_not_queried(folder, monkeypatch):
    store = Store(HostDir(folder.parent.parent))
    for environment in ("llamacpp", "vllm", "elsewhere"):  # without it, not built, unknown
        assert interpreter(environment, store) is None
    monkeypatch.setattr(preflight_weights, "META_PACKAGES", ("torch", "no-such-package"))
    assert interpreter("main", store) is None


def test_an_engine_that_differs_from_the_planner_warns_of_it():
    count = EngineCount("It builds 2 parameters.", 100)
    assert compare_counts(count, 104) == count.sentence == compare_counts(count, None)
    assert compare_counts(count, 106).endswith("unlike the planner: the plan's memory may be off.")


# llama.cpp


def test_recorded_outputs_are_read():
    arguments = fitted_arguments(FITTED)
    assert arguments[:4] == ["-c", "4096", "-ngl", "48"]
    assert fitted_arguments(UNCHANGED) == ["-c", "0", "-ngl", "-1"]
    assert [each.device for each in device_memory(ESTIMATED)] == ["MTL0", "host"]
    assert device_memory(ESTIMATED)[0][1:] == (7401 * 2**20, 814 * 2**20, 517 * 2**20)
    for read, text in ((fitted_arguments, "-c 0 --log-file /x"), (fitted_arguments, ""),
                       (device_memory, UNCHANGED)):  # fmt: skip
        with pytest.raises(BadInputError, match="printed no"):
            read(text)


def llama_here(folder, monkeypatch, *, fitted: str = FITTED, code: int = 0) -> None:
    """Put a file and a tool on the host that prints recorded outputs, and notes its arguments."""
    (folder / "model.gguf").write_bytes(b"GGUF")
    tool = folder / "bin" / "llama-fit-params"
    tool.parent.mkdir()
    tool.write_text(f"""#!/bin/sh
[ "$(head -c 4 "$2")" = GGUF ] || exit 9
echo "$@" >> {shlex.quote(str(folder))}/calls
ls "$(dirname "$2")" > {shlex.quote(str(folder))}/seen
case "$*" in
*--fit-print*) printf %s {shlex.quote(ESTIMATED)} ;;
*) printf %s {shlex.quote(fitted)}; echo "error: unknown model architecture" >&2; exit {code} ;;
esac
""")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")


def test_preflight_shows_what_llama_cpp_chooses_and_takes(folder, monkeypatch):
    llama_here(folder, monkeypatch)
    (check,) = checks(
        EngineNeeds("llamacpp", 8 * GIB, is_login_node=False), query_of(folder, 8192)
    )
    assert check.ok
    assert check.sentence == (
        "llama-fit-params chooses a context of 4,096 tokens and -ngl 48 and keeps some tensors in "
        "host memory, with GiB of weights + context + buffers on MTL0 7.23 + 0.79 + 0.50; host "
        "1.25 + 0.00 + 0.15. The planner predicts at least 8.00 GiB for the job."
    )
    first, second = (folder / "calls").read_text().splitlines()
    assert first.endswith(" -c 8192")
    assert " --fit off --fit-print on -c 4096 -ngl 48 -ot " in second


def test_all_parts_of_a_split_model_lie_beside_the_first_for_llama_cpp(folder, monkeypatch):
    llama_here(folder, monkeypatch)
    parts = [f"model-0000{at}-of-00002.gguf" for at in (1, 2)]
    for name in parts:
        (folder / name).write_bytes(b"GGUF")
    (folder / "model.gguf").unlink()
    assert "host 1.25 + 0.00 + 0.15" in llama_count(query_of(folder)).sentence
    assert (folder / "seen").read_text().split() == parts
    assert (folder / "calls").read_text().split()[1].endswith(f"/{parts[0]}")
    (folder / parts[1]).unlink()
    assert f"lacks {parts[1]}, of a model in 2 parts" in llama_count(query_of(folder)).sentence


def test_what_llama_cpp_does_not_count_is_told(folder, monkeypatch):
    llama_here(folder, monkeypatch, code=1)
    assert "llama-fit-params failed: error: unknown model architecture; run it on the file" in (
        llama_count(query_of(folder)).sentence
    )
    (folder / "second.gguf").write_bytes(b"GGUF")
    assert (
        "holds 2 .gguf models (model.gguf, second.gguf); keep one"
        in llama_count(query_of(folder)).sentence
    )


def test_without_the_tool_or_on_a_login_node_llama_cpp_is_not_queried(folder, monkeypatch):
    llama_here(folder, monkeypatch)
    assert checks(EngineNeeds("llamacpp", 0, is_login_node=True), query_of(folder)) == ()
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert checks(EngineNeeds("llamacpp", 0, is_login_node=False), query_of(folder)) == ()


# vLLM

# https://github.com/vllm-project/vllm/issues/21348: Qwen3-235B-A22B-FP8 on four H100
MEMORY_LOG = "Available KV cache memory: 8.11 GiB\nGPU KV cache size: 178,880 tokens\n"
# https://github.com/vllm-project/vllm/pull/13596
TOKENS_LOG = """\
INFO 02-19 23:56:55 kv_cache_utils.py:524] GPU KV cache size: 2,042,016 tokens
INFO 02-19 23:56:55 kv_cache_utils.py:527] Maximum concurrency for 2,048 tokens per request: 997.08x
"""

# vLLM 0.32.0's build for processors on two cores, 2026-11-30: a model of 1 million parameters.
CPU_LOG = """\
(Worker pid=1) INFO 11-30 14:25:13 [cpu_worker.py:260] Explicitly set (0.06/11.34) GiB for KV cache on node 0.
(EngineCore pid=2) INFO 11-30 14:25:13 [kv_cache_utils.py:2327] CPU KV cache size: 32,768 tokens, Maximum concurrency for 512 tokens per request: 64.00x
"""


def served(host_dir: HostDir, attempt_id: str, folder, log: str, **changes: object) -> None:
    """Leave an attempt that served a folder, with its output."""
    spec = ServeSpec(model=FolderModel(path=str(folder)), **{"engine": "vllm", **changes})
    request = RunRequest(attempt_id=attempt_id, job_id="job", number=1, fence="f", spec=spec)
    path = host_dir.attempts / attempt_id
    path.mkdir(parents=True)
    (path / "spec.json").write_text(request.model_dump_json())
    (path / "stderr.log").write_text(log)
    os.utime(path / "spec.json", (len(attempt_id), len(attempt_id)))  # a longer id is newer


def test_recorded_logs_of_vllm_are_read():
    vllm = ENGINES["vllm"]
    assert memory_in(vllm, MEMORY_LOG) == "8.11 GiB for the KV cache, a KV cache of 178,880 tokens"
    assert memory_in(vllm, TOKENS_LOG) == (
        "a KV cache of 2,042,016 tokens, room for 997.08 requests of 2,048 tokens"
    )
    assert memory_in(vllm, CPU_LOG) == (
        "0.06 GiB for the KV cache, a KV cache of 32,768 tokens, "
        "room for 64.00 requests of 512 tokens"
    )
    assert memory_in(vllm, "INFO Model loading took 67.7229 GiB and 3.2 seconds") == ""


def test_preflight_shows_the_newest_start_of_vllm_with_the_folder_that_got_as_far(folder):
    host_dir = HostDir(folder.parent.parent)
    (folder / "model.safetensors").write_bytes(b"")
    wanted = EngineNeeds("vllm", 0, is_login_node=False)
    host_dir.attempts.mkdir()
    assert [check.name for check in checks(wanted, query_of(folder))] == ["weights"]

    served(host_dir, "a1", folder, MEMORY_LOG)
    served(host_dir, "a22", folder, TOKENS_LOG)
    served(host_dir, "a333", folder, "RuntimeError: no kernel image")
    served(host_dir, "a4444", folder.parent, MEMORY_LOG)
    served(host_dir, "a55555", folder, MEMORY_LOG, engine="sglang")
    (folder / "config.json").write_text("{}")  # the folder changes

    check = checks(wanted, query_of(folder))[-1]
    assert (check.name, check.ok) == ("vLLM", True)
    assert check.sentence.startswith("vLLM's last start with it here, a22, logged per device: a")
