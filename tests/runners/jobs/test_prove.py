"""The stages of a validation name an injected fault, and find none without."""

import io
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from transformers import AutoTokenizer

from runners.host import inventory
from runners.host.bench import BenchFailedError
from runners.host.bench import run as launch
from runners.host.inventory import Device, TorchDevice
from runners.jobs.bench.device_rates import SMALL
from runners.jobs.generate import batching
from runners.jobs.generate.static import run_batch
from runners.jobs.prove import (
    correctness,
    distributed,
    engines,
    identity,
    jobs,
    rates,
    speed,
    weight_only,
)
from runners.jobs.prove.recorder import Recorder
from runners.jobs.runtime import BadInputError
from runners.jobs.serve.padded_decode import PaddedDecode
from runners.jobs.train import trainer as training
from runners.jobspec import ProveSpec
from runners.prove.report import RECORD, Check, Missing, Report, validation_rates
from tests.plugins.extent import sample

OFF = 1.01  # a kernel that is off by 1e-2
CPU = torch.device("cpu")


def new_recorder():
    """Return a recorder of the smallest sizes, with what it wrote as ``records``."""
    out = io.StringIO()
    recorder = Recorder(out, CPU, seconds=600.0, is_small=True)
    recorder.records = lambda: [RECORD.validate_json(line) for line in out.getvalue().splitlines()]
    return recorder


@pytest.fixture
def recorder():
    return new_recorder()


def failed(recorder) -> list[str]:
    """Return the names of the checks that are not met."""
    return [
        each.name for each in recorder.records() if isinstance(each, Check) and not each.is_met
    ]


def times(function, factor):
    """Return the function with its result multiplied."""
    return lambda *args, **kwargs: function(*args, **kwargs) * factor


GPU = Device(
    index=0, uuid="GPU-aa", name="NVIDIA H100 80GB HBM3", vendor="NVIDIA",
    memory_bytes=80 * 2**30, compute_capability="9.0", architecture="Hopper", links=("X",),
    clock_hertz=1.9e9, max_clock_hertz=1.98e9, power_watts=600.0, power_limit_watts=700.0,
    temperature_celsius=60.0, slowed_by=(), unread=(),
)  # fmt: skip
OTHER = replace(GPU, index=1, uuid="GPU-bb")
TORCH = [TorchDevice("NVIDIA H100 80GB HBM3", uuid, 79 * 2**30) for uuid in ("aa", "bb")]
SAME = "driver and torch see the same devices"


def test_devices_that_are_not_as_their_driver_says_are_named(monkeypatch):
    hot, slow = replace(GPU, slowed_by=("hardware thermal",)), replace(GPU, clock_hertz=0.6e9)
    for devices, seen, names, words in (
        ([GPU, OTHER], TORCH, [], ""),
        ([GPU, OTHER], TORCH[:1], [SAME], "torch sees 1 GPUs of 2"),
        ([GPU, OTHER], TORCH[::-1], [SAME], "torch counts GPU 1 as its number 0"),
        ([GPU], [TORCH[0]._replace(memory_bytes=39 * 2**30)], [SAME], "39.0 GiB of GPU 0"),
        ([hot], TORCH[:1], ["GPU 0: nothing slows it down"], "hardware thermal"),
        ([slow], TORCH[:1], ["GPU 0: clock under load"], "600 MHz"),
    ):
        recorder = new_recorder()
        recorder.is_small = False
        monkeypatch.setattr(inventory, "devices_here", lambda devices=devices: devices)
        monkeypatch.setattr(identity, "_under_load", lambda _recorder, devices=devices: devices)
        monkeypatch.setattr(identity, "seen_by_torch", lambda seen=seen: seen)
        identity._gpus(recorder)
        assert failed(recorder) == names, words
        assert any(words in getattr(each, "found", "") for each in recorder.records()), words


def test_without_the_drivers_library_the_devices_are_missing_and_not_wrong(recorder, monkeypatch):
    monkeypatch.setattr(identity.importlib.util, "find_spec", lambda _name: None)
    identity._gpus(recorder)
    (missing,) = recorder.records()
    assert (missing.cause, missing.advice) == ("library", "pip install nvidia-ml-py")


KERNELS = {
    "matmul bf16": (torch, "mm", times(torch.mm, OFF)),
    "matmul int8": (torch, "_int_mm", lambda a, b: torch.mm(a.int(), b.int()) + 1),
    "attention sdpa bfloat16": (
        functional,
        "scaled_dot_product_attention",
        times(functional.scaled_dot_product_attention, OFF),
    ),
    "weight-only int4": (
        weight_only.Int4Linear,
        "forward",
        times(weight_only.Int4Linear.forward, float("nan")),
    ),
}


def test_a_kernel_that_is_off_by_a_hundredth_is_named(monkeypatch):
    for name, broken in KERNELS.items():
        recorder = new_recorder()
        with monkeypatch.context() as patched:
            patched.setattr(*broken)
            for part in ("bf16", "int8"):
                correctness._product(recorder, part)
            correctness._attention(recorder, torch.bfloat16)
            correctness._weight_only(recorder, "int4")
        assert failed(recorder) == [name]


def test_kernels_and_layers_are_right_as_they_are(recorder):
    for name in correctness.TOLERANCES:
        correctness._product(recorder, name)
    for dtype in (torch.float32, torch.bfloat16):
        correctness._attention(recorder, dtype)
    for kind in ("bf16", "int8", "int4", "nf4"):
        correctness._weight_only(recorder, kind)
    assert failed(recorder) == []
    assert len(recorder.records()) == 4 + 2 + 8  # no TF32 and FP8 on a CPU


def test_a_compiled_model_that_computes_something_else_is_named(recorder, monkeypatch, tmp_path):
    class Off:
        def __init__(self, model):
            self.model = model

        def __call__(self, **inputs):
            output = self.model(**inputs)
            output.logits *= OFF
            return output

    monkeypatch.setattr(correctness, "check_compiler", lambda *_: None)
    monkeypatch.setattr(torch, "compile", lambda model: model)
    correctness._compiled(recorder, tmp_path)
    assert failed(recorder) == []
    monkeypatch.setattr(torch, "compile", Off)
    correctness._compiled(recorder, tmp_path)
    assert failed(recorder) == ["compiled model"]


@pytest.mark.parametrize(("token", "reason"), [(7, ""), (None, "no Triton here")])
def test_a_compiled_step_that_writes_other_tokens_or_runs_plainly_is_named(
    recorder, monkeypatch, tmp_path, token, reason
):
    class Step:
        plain_reason = reason

        def __init__(self, model, *_):
            self.model = model

        def run_batch(self, prompts, limits):
            run = run_batch(self.model, prompts, limits)
            run.answers[0].ids[-1] = run.answers[0].ids[-1] if token is None else token
            return run

    monkeypatch.setattr(batching, "CompiledStep", Step)
    correctness._compiled_decode(recorder, tmp_path)
    assert failed(recorder) == ["compiled decode step"]
    assert reason in recorder.records()[-1].found


@pytest.mark.parametrize("is_off", [False, True])
def test_a_padded_decode_step_that_gives_other_tokens_is_named(recorder, monkeypatch, is_off):
    def off(decode, rows, samplers):
        choices = step(decode, rows, samplers)
        return [replace(each, token=each.token ^ is_off) for each in choices]

    step = PaddedDecode.step
    monkeypatch.setattr(PaddedDecode, "step", off)
    correctness._serving_decode(recorder)
    assert failed(recorder) == ["serving decode step"] * is_off


def forgetting(self):
    """Resume the weights and not the optimiser's moments."""
    state = self.layout.resume(self.job.checkpoint_dir, self.optimizer)
    if state is not None:
        self.optimizer.state.clear()
        self.state = state


TRAINING = {
    "resumed from a checkpoint": (training.Trainer, "resume", forgetting),
    "optimiser states in a file": (
        "runners.jobs.train.optimizers.OffloadedAdamW",
        "update_weight",
        lambda _self, parameter, gradient, group: parameter.sub_(gradient, alpha=group["lr"]),
    ),
    "activation recomputation": (
        training,
        "recompute",
        lambda model, how: how == "full" and model.lm_head.weight.data.mul_(OFF),
    ),
}


@pytest.mark.parametrize("name", sample([None, *TRAINING], 0.5, kind=bool))
def test_a_training_path_that_ends_in_other_weights_is_named(
    recorder, monkeypatch, tmp_path, name
):
    if name is not None:
        place, attribute, broken = TRAINING[name]
        if isinstance(place, str):
            monkeypatch.setattr(f"{place}.{attribute}", broken)
        else:
            monkeypatch.setattr(place, attribute, broken)
    correctness._training(recorder, tmp_path)
    assert failed(recorder) == ([] if name is None else [name])


def test_an_absent_library_is_missing_and_does_not_end_the_stage(recorder, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.nn.modules", None)
    with recorder.part("weight-only nf4"):
        correctness._weight_only(recorder, "nf4")
    with recorder.part("lora step"):  # as the adapters' module tells it
        raise BadInputError("adapters need peft on this host") from ImportError(name="peft")
    packages = ("bitsandbytes", "peft")
    for missing, package in zip(recorder.records(), packages, strict=True):
        assert (missing.cause, missing.advice) == ("library", f"pip install {package}")


def test_frozen_weights_that_a_step_changes_are_named(recorder, monkeypatch):
    step = torch.optim.AdamW.step

    def leaking(self, *args):
        step(self, *args)
        self.base.data.add_(1e-3)

    lora = correctness.Lora

    def noted(model, options):
        lora(model, options)
        torch.optim.AdamW.base = next(p for p in model.parameters() if not p.requires_grad)

    monkeypatch.setattr(correctness, "Lora", noted)
    monkeypatch.setattr(torch.optim.AdamW, "step", leaking)
    monkeypatch.setattr(torch.optim.AdamW, "base", None, raising=False)
    correctness._lora(recorder, "lora")
    assert failed(recorder) == ["lora: frozen weights stay"]


def test_a_rate_that_falls_and_a_copy_that_lags_are_named(recorder, monkeypatch):
    recorder.is_small = False
    falling = iter([[1.0] * 8 + [2.0] * 8])
    monkeypatch.setattr(rates, "run_seconds", lambda *_args, **_options: next(falling))
    rates._steady(recorder, SMALL)
    monkeypatch.setattr(rates, "triad_rates", lambda *_: [9e9])
    monkeypatch.setattr(rates, "memory_copy_rates", lambda *_: [1e9])
    rates._memory(recorder, SMALL)
    assert failed(recorder) == ["the rate is steady", "a copy keeps up with the triad"]


def test_rates_of_the_smallest_sizes(recorder, tmp_path):
    rates.run(recorder, tmp_path)
    assert failed(recorder) == []
    names = {each.name for each in recorder.records() if not isinstance(each, Missing)}
    assert {"memory triad", "matmul bf16", "attention sdpa", "weight-only int4"} <= names
    figures = [each for each in recorder.records() if each.record == "figure"]
    assert validation_rates(figures).device.flops_per_second.keys() == {
        "fp32",
        "bf16",
        "fp16",
        "int8",
    }
    assert validation_rates(figures[:1]) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_memory_that_does_not_suffice_is_named_and_the_next_part_runs(
    recorder, monkeypatch, tmp_path
):
    def full(*_args, **_options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 GiB")

    monkeypatch.setattr(speed, "run_batch", full)
    speed.run(recorder, tmp_path)
    assert {name.split(",")[0] for name in failed(recorder)} == {
        "decode bf16",
        "decode int8",
        "decode int4",
    }
    figures = {each.name for each in recorder.records() if each.record == "figure"}
    assert {"prefill of 16", "training step", "gptq of a matrix"} <= figures
    assert {f"serving decode bf16, batch {each}, eager" for each in (1, 2)} <= figures


def test_every_kind_of_job_must_end_with_finite_figures(recorder, monkeypatch, tmp_path):
    def answer(folder, attempt, _spec):
        (folder / "attempts" / attempt / "output" / "model").mkdir(parents=True)
        if attempt == "benchmark":
            raise BenchFailedError("benchmark: CUDA error: an illegal memory access")
        if attempt == "compress-gguf":
            raise BenchFailedError("compress-gguf: ModuleNotFoundError: No module named 'gguf'")
        if attempt == "generate":
            raise BenchFailedError("BAD_INPUT: a `device_map` requires `accelerate`.")
        return {"perplexity": float("nan" if attempt == "evaluate" else 3.0)}

    monkeypatch.setattr(jobs, "launch", answer)
    jobs.run(recorder, tmp_path)
    assert failed(recorder) == ["benchmark", "evaluate"]
    missing = [each for each in recorder.records() if isinstance(each, Missing)]
    assert [(each.name, each.advice) for each in missing] == [
        ("generate", "pip install accelerate"),
        ("compress gguf", "pip install gguf"),
    ]


def test_jobs_that_need_the_trained_model_are_missing_without_it(recorder, monkeypatch, tmp_path):
    def answer(_folder, _attempt, _spec):
        raise BenchFailedError("trained: RuntimeError: no kernel image is available")

    monkeypatch.setattr(jobs, "launch", answer)
    jobs.run(recorder, tmp_path)
    assert failed(recorder) == ["trained"]
    assert len(recorder.records()) == len(jobs.specs())


def results_of_ranks(size, work, _backend):
    """Return what ranks return that take 0.8 of one device's time; tensor parallel dies."""
    first = work.args[0]
    if not isinstance(first, distributed.Work):  # the collectives
        return [{"sum": distributed.SUM, **{str(each): 1e9 for each in first}}]
    if "tensor_parallel_size" in (first.layout or ()):
        raise RuntimeError("rank 1 of 2: ended with code -9")
    seconds = [1.0, 2.0, 9.0] if size == 1 else [0.8, 1.6, 1.6]
    return [
        {f"{name} {step}": 1.0 for step in range(3) for name in ("loss", "grad_norm")}
        | ({f"seconds {step}": each for step, each in enumerate(seconds)} if first.load else {})
    ]


@pytest.mark.parametrize("norm", [OFF**2, float("nan")])
def test_a_rank_that_dies_and_a_layout_that_differs_are_named(
    recorder, monkeypatch, tmp_path, norm
):
    def ranks(size, work, backend):
        (lead,) = results_of_ranks(size, work, backend)
        if "zero_stage" in (getattr(work.args[0], "layout", None) or ()):
            lead["grad_norm 2"] = norm
        return [lead]

    monkeypatch.setattr(distributed, "on_ranks", ranks)
    monkeypatch.setattr(distributed, "num_threads", lambda: 2)
    distributed.run(recorder, tmp_path)
    assert failed(recorder) == ["ZeRO 3", "tensor parallel"]
    figures = {each.name: each for each in recorder.records() if each.record == "figure"}
    step = distributed.SMALL.tokens
    assert figures["training, one device"].samples == (step / 1.0, step / 2.0, step / 9.0)
    assert figures["training, expert parallel over 2"].value == step / 1.6
    efficiency = figures["scaling efficiency, expert parallel over 2"]
    assert (efficiency.value, efficiency.unit) == (2.0 / (2 * 1.6), "ratio")
    assert len(efficiency.samples) == 3


def test_layouts_are_timed_on_the_devices_that_there_are(monkeypatch, tmp_path):
    only = {"ZeRO 1": distributed.LAYOUTS["data parallel"]}
    monkeypatch.setattr(distributed, "LAYOUTS", only)
    for device, devices, memory_bytes, counts, words in (
        ("cpu", 1, 0, [], "it needs 2 cores, and this host has 1"),
        ("cpu", 96, 0, [2], ""),
        ("cuda", 1, 80e9, [], "it needs 2 GPUs, and this host has 1"),
        ("cuda", 3, 80e9, [2], ""),
        ("cuda", 5, 80e9, [2, 4], ""),
        ("cuda", 16, 80e9, [2, 8], ""),
        ("cuda", 2, 8e9, [], "on each GPU, and this one has"),
    ):
        out = io.StringIO()
        recorder = Recorder(out, torch.device(device), seconds=600.0, is_small=False)
        found = SimpleNamespace(total_memory=memory_bytes)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda _device, found=found: found
        )
        distributed.LayoutRuns(recorder, tmp_path, results_of_ranks, "gloo", devices).record()
        records = [RECORD.validate_json(line) for line in out.getvalue().splitlines()]
        named = [each.name for each in records if each.name.startswith("scaling efficiency")]
        assert named == [f"scaling efficiency, ZeRO 1 over {count}" for count in counts], words
        missing = [each.why for each in records if isinstance(each, Missing)]
        assert len(missing) == bool(words), (device, devices)
        assert all(words in why for why in missing), (device, devices)


EXPERTS_ALONE = """
import atexit, sys
from torch._inductor.runtime import cache_dir_utils
from runners.jobs.prove import distributed as layouts
from runners.jobs.train.layout_tensor import LocalExperts

right = layouts.LAYOUTS["expert parallel"]
forward = LocalExperts.forward

def wrong(ranks):
    LocalExperts.forward = lambda *given: forward(*given) * 1.5
    return right.fields(ranks)

layouts.LAYOUTS = {"right": right, "wrong": right._replace(fields=wrong)}
atexit.register(lambda: print("kernels in", cache_dir_utils.cache_dir(), file=sys.stderr))
"""


@pytest.mark.slow
def test_a_stage_names_divided_experts_that_differ_and_keeps_its_kernels_to_itself(tmp_path):
    """A stage that is killed leaves no half-written kernel where others look for it."""
    (tmp_path / "sitecustomize.py").write_text(EXPERTS_ALONE)
    search = os.pathsep.join([str(tmp_path), *sys.path])
    shared = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "shared")}
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "runners.jobs.prove.recorder",
            "distributed",
            str(tmp_path),
            "--small",
        ],
        env={**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "2", **shared},
        capture_output=True,
        check=True,
    )
    records = [RECORD.validate_json(line) for line in ended.stdout.splitlines()]
    checks = {each.name: each.is_met for each in records if isinstance(each, Check)}
    assert checks == {"sums of ranks": True, "right": True, "wrong": False}
    kernels = {each for each in ended.stderr.splitlines() if each.startswith(b"kernels in")}
    assert kernels == {f"kernels in {tmp_path / 'kernels'}".encode()}
    efficiency = records[-1]
    assert efficiency.name == "scaling efficiency, wrong over 2"
    assert len(efficiency.samples) == distributed.TIMED_STEPS
    assert efficiency.value > 0


def process_of(ranks):
    """Return a rank's number and process, and whether that is a fork that cannot use CUDA."""
    is_fork = torch.cuda._is_in_bad_fork()
    return {"rank": ranks.rank, "pid": os.getpid(), "is_fork": is_fork}


def fail_on_the_second(ranks):
    """Fail on one rank, while the other waits for it."""
    if ranks.rank == 1:
        raise ValueError("no such layout")
    return process_of(ranks)


@pytest.mark.slow
def test_ranks_beside_a_gpu_are_new_processes_and_the_error_of_one_is_named():
    with distributed.rank_starter(has_gpu=True) as start:
        first, again = (start(2, process_of, "gloo") for _ in range(2))
        with pytest.raises(RuntimeError, match="rank 1 of 2: ValueError: no such layout"):
            start(2, fail_on_the_second, "gloo")
        after = start(1, process_of, "gloo")
    assert [each["rank"] for each in first] == [0, 1]
    assert first == again
    assert len({os.getpid(), *(each["pid"] for each in [*first, *after])}) == 4
    assert not any(each["is_fork"] for each in first)


VLLM = """#!/bin/sh
case "$*" in *"--load-format dummy"*"--batch-size 64"*) exit 3;; esac
while [ "$1" != --output-json ]; do shift; done
echo '{"avg_latency": 2.0, "latencies": [2.0, 1.9, 2.1], "percentiles": {}}' > "$2"
"""
# github.com/ggml-org/llama.cpp, tools/llama-bench/README.md, JSON; the rates vary.
LLAMA = """#!/bin/sh
echo '[{"n_prompt": 16, "n_gen": 0, "avg_ts": 7100.0}, {"n_prompt": 0, "n_gen": 8, "avg_ts": %s}]'
"""


def test_other_engines_are_measured_where_they_are_installed(recorder, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    engines.vllm_speeds(recorder, speed.SMALL, (1,), tmp_path)
    for name, text in (("vllm", VLLM), ("llama-bench", LLAMA % "0.0")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    engines.vllm_speeds(recorder, speed.SMALL, (1, 64), tmp_path)
    engines.llama_reads(recorder, tmp_path / "model.gguf")

    absent, figure, *_ = recorder.records()
    assert (absent.name, absent.cause) == ("vllm", "device")
    assert (figure.name, figure.value) == ("vllm bf16, batch 1", engines.OUTPUT_TOKENS / 2.0)
    assert (figure.question.engine, figure.question.metric) == ("vllm", "tokens_per_second")
    assert failed(recorder) == ["vllm bf16, batch 64", "llama.cpp runs the GGUF file"]


# Lines of latency_test_run_once of SGLang 0.5.23, sglang/benchmark/one_batch.py, that ran with a
# model runner which sleeps.
SGLANG_RUN = (
    '{"run_name": "default", "batch_size": 1, "input_len": 128, "output_len": 128, '
    '"prefill_latency": 0.004140544000051705, "prefill_throughput": 30913.812290945734, '
    '"median_decode_latency": 0.0009752890000527259, '
    '"median_decode_throughput": 1025.3371051513327, '
    '"total_latency": 0.13496648699924663, "overall_throughput": 1896.7671582163132}'
)
SGLANG = """
import argparse, json, pathlib
parser = argparse.ArgumentParser()
for name in ("--model-path", "--load-format", "--dtype", "--result-filename"):
    parser.add_argument(name, required=True)
for name in ("--batch-size", "--input-len", "--output-len"):
    parser.add_argument(name, type=int, nargs="+", required=True)
given = parser.parse_args()
assert json.loads(pathlib.Path(given.model_path, "config.json").read_text())["hidden_size"]
runs = [dict(RUN, batch_size=size) for size in given.batch_size]
runs[0]["total_latency"] = 60.0  # as it warms up
"""
WRITTEN = """
with open(given.result_filename, "a") as result:
    for run in runs:
        result.write(json.dumps(run) + "\\n")
"""


@pytest.mark.parametrize(
    ("ends", "figures", "faults", "missing"),
    [
        (WRITTEN, [1, 64], [], {}),
        (
            "runs = [run for run in runs if run['batch_size'] == 1]" + WRITTEN,
            [1],
            [],
            {"sglang bf16, batch 64": "device"},
        ),
        ("del runs[3]['total_latency']" + WRITTEN, [], [], {"sglang": "library"}),
        ("raise SystemExit(0)", [], [], {"sglang": "library"}),
        ("raise SystemExit('no kernel image is available')", [], ["sglang"], {}),
    ],
)
@pytest.mark.parametrize("module", ["benchmark/one_batch.py", "bench_one_batch.py"])
def test_sglang_is_measured_where_it_is_installed(
    recorder, monkeypatch, tmp_path, module, ends, figures, faults, missing
):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    engines.sglang_speeds(recorder, speed.ON_A_CPU, (1, 64), tmp_path)
    (absent,) = recorder.records()
    assert (absent.name, absent.cause) == ("sglang", "device")

    file = tmp_path / "sglang" / module
    file.parent.mkdir(parents=True)
    file.write_text(SGLANG.replace("RUN", SGLANG_RUN) + ends)
    monkeypatch.syspath_prepend(str(tmp_path))
    engines.sglang_speeds(recorder, speed.ON_A_CPU, (1, 64), tmp_path)
    found = {each.name: each for each in recorder.records()[1:] if each.record == "figure"}
    assert list(found) == [
        f"sglang {what}bf16, batch {batch}" for batch in figures for what in ("", "decode ")
    ]
    for batch in figures:
        whole, decode = (found[f"sglang {what}bf16, batch {batch}"] for what in ("", "decode "))
        assert whole.samples == (batch * 128 / 0.13496648699924663,) * (engines.RUNS - 1)
        assert (whole.question.engine, whole.question.metric) == ("sglang", "tokens_per_second")
        assert (whole.unit, decode.value) == ("tokens/s", 1025.3371051513327)
    assert failed(recorder) == faults
    others = [each for each in recorder.records()[1:] if isinstance(each, Missing)]
    assert {each.name: each.cause for each in others} == missing
    assert AutoTokenizer.from_pretrained(tmp_path / "sglang-model").vocab_size == 1


def test_without_time_a_part_is_missing_and_says_what_to_do(tmp_path):
    out = io.StringIO()
    distributed.run(Recorder(out, CPU, seconds=0.0, is_small=True), tmp_path)
    records = [RECORD.validate_json(line) for line in out.getvalue().splitlines()]
    missing = [each for each in records if isinstance(each, Missing)]
    assert [each.name for each in missing] == list(distributed.LAYOUTS)
    assert all("--minutes" in each.advice for each in missing)


@pytest.mark.slow
def test_as_a_job_it_leaves_its_report_and_fails_if_something_is_wrong(tmp_path, monkeypatch):
    spec = ProveSpec(stages=("identity",), is_small=True)
    measured = launch(tmp_path, "proof", spec)
    folder = tmp_path / "attempts" / "proof" / "output" / "proof"
    report = Report.model_validate_json((folder / "report.json").read_bytes())
    assert (measured, report.verdict) == ({}, "proven")
    assert (folder / "report.html").is_file()

    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # a torch that counts other threads
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'identity' in sys.argv:\n"
        "    import torch\n"
        "    torch.set_num_threads = lambda _count: None\n"
        "    torch.get_num_threads = lambda: 99\n"
    )
    with pytest.raises(BenchFailedError, match="PROOF_FAILED: identity: torch computes with"):
        launch(tmp_path, "wrong", spec)
