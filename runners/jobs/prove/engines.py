"""Other engines where they are installed: vLLM on the same shape, llama.cpp on a GGUF file.

vLLM makes its own random weights (``--load-format dummy``) from the shape's config.json.

Source: docs.vllm.ai, vllm bench latency; github.com/ggml-org/llama.cpp, tools/llama-bench.
"""

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runners.jobs.prove.recorder import Recorder
from runners.prove.report import Question

INPUT_TOKENS, OUTPUT_TOKENS = 128, 128
START_SECONDS = 150.0  # of vLLM: compilation, profiling and capture of graphs
MAX_ERROR = 600


def vllm_speeds(
    recorder: Recorder, config: Mapping[str, Any], batches: Sequence[int], folder: Path
) -> None:
    """Record vLLM's generation of whole batches, where the command ``vllm`` is there."""
    program = shutil.which("vllm")
    if program is None:
        recorder.missing("vllm", "the command vllm is not installed here")
        return
    model = write_config(config, folder / "vllm-model")
    for batch in batches:
        name = f"vllm bf16, batch {batch}"
        if not recorder.has_time(name, START_SECONDS):
            continue
        with recorder.part(name, advice="Run the command by hand and read its log."):
            seconds = _vllm_seconds(program, model, batch, folder, recorder.seconds_left)
            recorder.figure(
                name,
                "tokens/s",
                [batch * OUTPUT_TOKENS / each for each in seconds],
                f"prompts of {INPUT_TOKENS} tokens, {OUTPUT_TOKENS} tokens each, prefill included",
                Question(
                    model=dict(config),
                    workload={
                        "kind": "generate",
                        "batch_size": batch,
                        "input_tokens": INPUT_TOKENS,
                        "output_tokens": OUTPUT_TOKENS,
                    },
                    strategy={"weight_dtype": "bf16"},
                    engine="vllm",
                    metric="tokens_per_second",
                ),
            )


def write_config(config: Mapping[str, Any], folder: Path) -> Path:
    """Write a Llama's config.json for an engine that makes random weights from it."""
    folder.mkdir(exist_ok=True)
    architecture = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps({**config, **architecture}))
    return folder


def _vllm_seconds(
    program: str, model: Path, batch: int, folder: Path, seconds: float
) -> list[float]:
    """Return the seconds of each iteration of one batch."""
    found = folder / "vllm.json"
    run_program(
        [
            *(program, "bench", "latency", "--model", str(model), "--load-format", "dummy"),
            *("--skip-tokenizer-init", "--disable-detokenize", "--dtype", "bfloat16"),
            *("--max-model-len", str(4 * (INPUT_TOKENS + OUTPUT_TOKENS))),
            *("--batch-size", str(batch), "--input-len", str(INPUT_TOKENS)),
            *("--output-len", str(OUTPUT_TOKENS), "--num-iters", "3", "--num-iters-warmup", "2"),
            *("--output-json", str(found)),
        ],
        seconds,
    )
    return [float(each) for each in json.loads(found.read_text())["latencies"]]


def llama_reads(recorder: Recorder, file: Path) -> None:
    """Check that llama.cpp runs a GGUF file of this run, where ``llama-bench`` is there."""
    program = shutil.which("llama-bench")
    if program is None:
        recorder.missing("llama.cpp", "the command llama-bench is not installed here")
        return
    with recorder.part("llama.cpp", advice="Run llama-bench on the file by hand."):
        argv = [program, "-m", str(file), "-p", "16", "-n", "8", "-r", "1", "-o", "json"]
        rows = json.loads(run_program(argv, recorder.seconds_left))
        speeds = [float(row["avg_ts"]) for row in rows]
        recorder.check(
            "llama.cpp runs the GGUF file",
            is_met=bool(speeds) and min(speeds) > 0,
            expected="a prefill and a decode with a speed above zero",
            found=", ".join(f"{each:.1f} tokens/s" for each in speeds) or "no row",
        )


def run_program(argv: Sequence[str], seconds: float) -> str:
    """Return a program's output.

    Raises:
        RuntimeError: it failed or took too long; the message has its last words.
    """
    try:
        ended = subprocess.run(
            argv, capture_output=True, text=True, check=False, timeout=max(1.0, seconds)
        )
    except subprocess.TimeoutExpired as error:
        msg = f"{argv[0]} did not end within {seconds:.0f} s"
        raise RuntimeError(msg) from error
    if ended.returncode:
        words = (ended.stderr.strip() or ended.stdout.strip())[-MAX_ERROR:]
        msg = f"{argv[0]} ended with code {ended.returncode}: {words}"
        raise RuntimeError(msg)
    return ended.stdout
