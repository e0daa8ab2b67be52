"""What installed engines reach by benchmarks of their own, on the shape of the speed stage."""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, PositiveFloat, PositiveInt
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from runners.jobs.prove.recorder import Recorder
from runners.jobspec.engines import EngineName
from runners.prove.report import PlannerQuery
from runners.shared.log_text import last_line

INPUT_TOKENS, OUTPUT_TOKENS = 128, 128
START_SECONDS = 150.0  # of vLLM: compilation, profiling and capture of graphs


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
                PlannerQuery(
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
        RuntimeError: the program failed or took too long; the message ends with its output.
    """
    try:
        ended = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=max(1.0, seconds),
        )
    except subprocess.TimeoutExpired as error:
        msg = f"{argv[0]} did not end within {seconds:.0f} s"
        raise RuntimeError(msg) from error
    if ended.returncode:
        words = last_line(ended.stderr.strip() or ended.stdout, "no message")
        msg = f"{argv[0]} ended with code {ended.returncode}: {words}"
        raise RuntimeError(msg)
    return ended.stdout


# SGLang's own offline benchmark of one batch, on the shape that the speed stage measures.
#
# One process loads the model with random weights (``--load-format dummy``) and runs each batch
# size several times without a scheduler; it appends a JSON line per run. Source: SGLang 0.5.23
# (PyPI wheel), ``sglang/benchmark/one_batch.py``; before, the module was
# ``sglang.bench_one_batch``, with the same options and fields.


# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions without.


ENGINE = "sglang"
PACKAGE = "sglang"
MODULES = ("benchmark.one_batch", "bench_one_batch")  # below the package, the newest first
RUNS = 4  # of each batch size; the first one warms up
PROMPT_IDS = 10_000  # its prompts are of random token ids below this
BY_HAND = "Run the command by hand and read its log."


class BatchRun(BaseModel):
    """One line of the result; latencies in seconds, ``total_latency`` with the prefill."""

    batch_size: PositiveInt
    input_len: PositiveInt
    output_len: PositiveInt
    total_latency: PositiveFloat
    median_decode_throughput: PositiveFloat  # tokens/s of the whole batch


def sglang_speeds(
    recorder: Recorder, config: Mapping[str, Any], batches: Sequence[int], folder: Path
) -> None:
    """Record SGLang's generation and decode of whole batches, where the package is installed."""
    module = _module()
    if module is None:
        recorder.missing(ENGINE, f"a package {PACKAGE} with {MODULES[0]} is not installed here")
        return
    if config["vocab_size"] < PROMPT_IDS:
        recorder.missing(
            ENGINE,
            f"its prompts have token ids up to {PROMPT_IDS}, and this shape's vocabulary has "
            f"{config['vocab_size']}",
        )
        return
    if not recorder.has_time(ENGINE, START_SECONDS):
        return
    with recorder.part(ENGINE, advice=BY_HAND):
        result = folder / "sglang.jsonl"
        result.unlink(missing_ok=True)
        argv = [sys.executable, "-m", module, *_arguments(config, batches, folder)]
        run_program([*argv, "--result-filename", str(result)], recorder.seconds_left)
        try:
            runs = batch_runs(result.read_text())
        except (OSError, ValueError) as error:
            recorder.missing(
                ENGINE,
                f"the result of {module} is not of the known format: {error}",
                f"{BY_HAND} SGLang 0.5.23 is known.",
                "library",
            )
            return
        for batch in batches:
            _record(recorder, config, batch, [each for each in runs if each.batch_size == batch])


def _module() -> str | None:
    """Return the benchmark's module without importing the package, or None."""
    spec = importlib.util.find_spec(PACKAGE)
    for place in (spec and spec.submodule_search_locations) or ():
        for name in MODULES:
            if Path(place, *name.split(".")).with_suffix(".py").is_file():
                return f"{PACKAGE}.{name}"
    return None


def _arguments(config: Mapping[str, Any], batches: Sequence[int], folder: Path) -> list[str]:
    model = write_config(config, folder / "sglang-model")
    # One word: the benchmark loads a tokenizer, and encodes nothing with it.
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))  # noqa: S106 - no password
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")  # noqa: S106
    fast.save_pretrained(str(model))
    sizes = [str(batch) for batch in batches for _ in range(RUNS)]
    return [
        *("--model-path", str(model), "--load-format", "dummy", "--dtype", "bfloat16"),
        *("--batch-size", *sizes, "--input-len", str(INPUT_TOKENS)),
        *("--output-len", str(OUTPUT_TOKENS)),
    ]


def batch_runs(text: str) -> list[BatchRun]:
    """Return the runs of a result file.

    Raises:
        ValueError: a line is no JSON object with the known fields, or there is none.
    """
    runs = [BatchRun.model_validate(json.loads(line)) for line in text.splitlines() if line]
    if not runs:
        msg = "it has no line"
        raise ValueError(msg)
    return runs


def _record(
    recorder: Recorder, config: Mapping[str, Any], batch: int, runs: Sequence[BatchRun]
) -> None:
    name = f"{ENGINE} bf16, batch {batch}"
    measured = runs[1:]
    if not measured:
        recorder.missing(name, f"{ENGINE} skipped it: its cache has no room for this batch")
        return
    workload = {
        "kind": "generate",
        "batch_size": batch,
        "input_tokens": INPUT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
    }
    question = PlannerQuery(
        model=dict(config),
        workload=workload,
        strategy={"weight_dtype": "bf16"},
        engine=ENGINE,
        metric="tokens_per_second",
    )
    tokens = f"prompts of {INPUT_TOKENS} tokens, {OUTPUT_TOKENS} tokens each"
    recorder.figure(
        name,
        "tokens/s",
        [batch * each.output_len / each.total_latency for each in measured],
        f"{tokens}, prefill included",
        question,
    )
    recorder.figure(
        f"{ENGINE} decode bf16, batch {batch}",
        "tokens/s",
        [each.median_decode_throughput for each in measured],
        f"{tokens}, the median step",
        question.model_copy(update={"metric": "decode_tokens_per_second"}),
    )


# The engines whose own benchmark generates whole batches; each is recorded where it is installed.
SPEEDS: Mapping[EngineName, Callable[[Recorder, Mapping[str, Any], Sequence[int], Path], None]] = {
    "vllm": vllm_speeds,
    "sglang": sglang_speeds,
}
