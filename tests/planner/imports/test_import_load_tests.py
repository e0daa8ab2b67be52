"""Load tests and batches of other tools: the lengths and the arrivals that they state."""

from planner.imports import read_paste
from tests.planner.imports.test_import_commands import LLAMA, flat

VLLM = f"vllm bench serve --model {LLAMA}"
SGLANG = f"python -m sglang.bench_serving --model {LLAMA}"
AIPERF = f"aiperf profile -m {LLAMA}"
# A line, and the fields of its workload and engine, all of them.
LINES = {
    VLLM: {"input_tokens": 1024, "output_tokens": 128, "burst_requests": 1000},
    f"{VLLM} --backend vllm --request-rate 4 --max-concurrency 9 --random-range-ratio 0.9 "
    "--random-prefix-len 256": {
        "engine": "vllm", "input_tokens": 1280, "output_tokens": 128, "prefix_share_ratio": 0.2,
        "length_variation": 0.52, "request_rate_per_second": 4.0,
    },
    f"{VLLM} --request-rate inf --max-concurrency 32 --input-len 2k --output-len 200": {
        "input_tokens": 2000, "output_tokens": 200, "concurrency": 32,
    },
    f"{VLLM} --dataset-name sonnet --num-prompts 50": {
        "input_tokens": 550, "output_tokens": 150, "prefix_share_ratio": 0.3636,
        "burst_requests": 50,
    },
    f"{VLLM} --dataset-name sharegpt --output-len 99 --max-concurrency 2": {
        "output_tokens": 99, "concurrency": 2,
    },
    f"python benchmarks/benchmark_serving.py --model {LLAMA} --max-concurrency 2": {
        "input_tokens": 1024, "output_tokens": 128, "concurrency": 2,
    },
    # Uniform from half of the stated lengths up to them, and from one token.
    f"{SGLANG} --dataset-name random --random-range-ratio 0.5 --max-concurrency 4": {
        "engine": "sglang", "input_tokens": 768, "output_tokens": 768, "concurrency": 4,
        "length_variation": 0.192,
    },
    f"{SGLANG} --dataset-name random --random-input 1000 --max-concurrency 4": {
        "engine": "sglang", "input_tokens": 500, "output_tokens": 512, "concurrency": 4,
        "length_variation": 0.577,
    },
    f"{SGLANG} --backend vllm --dataset-name generated-shared-prefix --request-rate 2": {
        "engine": "vllm", "input_tokens": 2176, "output_tokens": 256,
        "prefix_share_ratio": 0.9412, "request_rate_per_second": 2.0,
    },
    f"{AIPERF} --isl 1000 --isl-stddev 100 --osl 200 --concurrency 8": {
        "input_tokens": 1000, "output_tokens": 200, "concurrency": 8, "length_variation": 0.1,
    },
    f"{AIPERF} --osl 100 --shared-system-prompt-length 550 --request-rate 0.5": {
        "input_tokens": 1100, "output_tokens": 100, "prefix_share_ratio": 0.5,
        "request_rate_per_second": 0.5,
    },
    f"genai-perf profile -m llama --tokenizer {LLAMA} --synthetic-input-tokens-mean 128 "
    "--output-tokens-mean 64 --concurrency 1": {
        "input_tokens": 128, "output_tokens": 64, "concurrency": 1,
    },
}  # fmt: skip
# What a plan of one load leaves out of a line, and says.
SAID = {
    f"{VLLM} --request-rate 4 --max-concurrency 9": "--max-concurrency 9: at most so many",
    f"{VLLM} --request-rate 4 --burstiness 0.5": "--burstiness 0.5: Slipway plans requests",
    f"{VLLM} --dataset-name hf --dataset-path a/b": "--dataset-name hf: lengths are those of",
    f"{VLLM} --ramp-up-strategy linear": "--ramp-up-strategy linear: Slipway plans one load",
    f"{AIPERF} --osl 9 --arrival-pattern constant": "--arrival-pattern constant: Slipway plans",
    f"{AIPERF} --osl 9 --session-turns-mean 3": "--session-turns-mean 3: Slipway plans single",
    f"{AIPERF} --osl 9": "as many requests at once as memory holds",
}


def test_a_load_test_states_lengths_and_arrivals():
    for line, fields in LINES.items():
        draft = read_paste(line)
        stated = {name.removeprefix("workload."): value
                  for name, value in flat(draft.request).items()}  # fmt: skip
        assert stated == {"model": LLAMA, "kind": "serve"} | fields, line
        assert draft.unknown == (), line


def test_what_one_load_leaves_out_is_said():
    for line, words in SAID.items():
        assert words in " ".join(read_paste(line).assumptions), line


def test_a_batch_has_the_engines_settings_without_those_of_a_server():
    draft = read_paste(
        f"vllm run-batch -i in.jsonl -o out.jsonl --model {LLAMA} -tp 2 --max-num-seqs 64 "
        "--max-model-len 4096 --kv-cache-dtype fp8"
    )
    assert draft.request == {
        "model": LLAMA,
        "engine": "vllm",
        "workload": {"kind": "generate"},
        "pins": {"tensor_parallel_size": 2, "kv_cache_dtype": "fp8"},
        "cluster": {"devices_per_node": 2},
    }
    assert any(each.startswith("workload.batch_size") for each in draft.missing)
    assert {"-i in.jsonl", "--max-num-seqs 64"} <= {each.source for each in draft.ignored}


def test_a_server_beside_its_load_test_is_the_one_that_is_read():
    draft = read_paste(f"{VLLM} --request-rate 4\nvllm serve {LLAMA} -tp 2")
    assert draft.kind == "vllm"
