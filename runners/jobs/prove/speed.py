"""Stage "speed": an 8B-shaped Llama with random weights, made on the device.

Decode at several batch sizes and weight dtypes, prefill, one training step with full
recomputation, and one layer's compression. Each figure carries the question that the planner is
asked about it. Where memory does not hold 32 layers there are fewer, in the question too.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from runners.jobs.bench.device_rates import run_seconds, wait_for
from runners.jobs.evaluation import Workload, measure_speed
from runners.jobs.generate.batching import CompiledStep
from runners.jobs.generate.static import AnswerLimits, BatchRun, run_batch
from runners.jobs.loading import fresh_model, ready
from runners.jobs.memory import (
    model_bytes,
    release_free_memory,
    tensor_bytes,
    used_device_bytes,
)
from runners.jobs.prove.engines import SPEEDS
from runners.jobs.prove.recorder import Recorder
from runners.jobs.prove.serving import decode_speeds
from runners.jobs.prove.weight_only import Int4Linear
from runners.jobs.runtime import BadInputError
from runners.prove.report import READ_WEIGHTS, PlannerQuery

# Llama-3.1-8B: huggingface.co/meta-llama/Llama-3.1-8B, config.json.
LLAMA_8B: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
}
ON_A_CPU: Mapping[str, Any] = {
    **LLAMA_8B,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 16384,
}
SMALL: Mapping[str, Any] = {
    **LLAMA_8B,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
PREFILLS = (512, 8192)
PROMPT_TOKENS = 128
# How a decode step runs -> the planner's engine; gpt-fast compiles it with CUDA graphs.
ENGINES = {"eager": None, "compiled": "gpt_fast"}
NOT_PLANNED = ("eager", "int4")  # the runner's own int4 is nf4
HELD_RATIO = 0.8  # of the device's free memory
ENERGY_RATIOS = (0.8, 1.25)  # of NVML's counter over power times time
POWER_SECONDS = 0.05
REPETITIONS = 3
# NVML's power is an average over the last second: over 0.7 s its integral was a fifth too low.
METERED_SECONDS = 4.0


class Scale(NamedTuple):
    """The sizes of this stage on one kind of device."""

    shape: Mapping[str, Any]
    output_tokens: int
    batches: tuple[int, ...]
    prefills: tuple[int, ...]
    training_layers: int
    training_tokens: int
    compressed_rows: int


def scale_of(recorder: Recorder) -> Scale:
    """Return the sizes for the recorder's device."""
    if recorder.is_small:
        return Scale(SMALL, 4, (1, 2), (16,), 1, 32, 128)
    if recorder.device.type == "cuda":
        return Scale(LLAMA_8B, 64, (1, 64, 8), PREFILLS, 8, 2048, 4096)
    return Scale(ON_A_CPU, 16, (1, 8), (512,), 2, 256, 1024)


def run(recorder: Recorder, folder: Path) -> None:
    """Measure decode, prefill, a training step and a layer's compression."""
    torch.manual_seed(0)
    scale = scale_of(recorder)
    first, *others = scale.batches  # of the goals; the larger ones if there is time
    with recorder.part("weights in bf16"):
        _plain(recorder, scale, [first])
    release_free_memory()
    if recorder.has_time("training step", 20):
        with recorder.part("training step"):
            _training(recorder, scale, folder)
    release_free_memory()
    _weight_only(recorder, scale, [first])
    release_free_memory()
    layers = fitting_layers(scale.shape, recorder.device, 2.5)
    for engine_speeds in SPEEDS.values():
        engine_speeds(recorder, {**scale.shape, "num_hidden_layers": layers}, (1, 64), folder)
    for method in ("gptq", "sparsegpt"):
        if recorder.has_time(f"{method} of a matrix", 10):
            with recorder.part(f"{method} of a matrix"):
                _compression(recorder, scale, method)
    if others:
        with recorder.part("weights in bf16"):
            _plain(recorder, scale, others)
        _weight_only(recorder, scale, others)


@contextmanager
def _peak_memory(recorder: Recorder, name: str, question: PlannerQuery) -> Iterator[None]:
    """Record a GPU's peak memory over a block, beside the planner's for the same question."""
    if recorder.device.type != "cuda":
        yield
        return
    release_free_memory()
    torch.cuda.reset_peak_memory_stats(recorder.device)
    yield
    recorder.figure(
        f"{name}, peak memory",
        "bytes",
        [float(used_device_bytes(recorder.device))],
        "of the device: contexts, workspaces and the allocator's blocks included",
        question.model_copy(update={"metric": "per_device_peak_bytes"}),
    )


def _made(config: Mapping[str, Any], device: torch.device) -> PreTrainedModel:
    """Return a bf16 model whose random weights were made on the device."""
    with device:
        model = fresh_model(dict(config), torch.bfloat16)
    return ready(model, device=device, dtype=torch.bfloat16)


def fitting_layers(config: Mapping[str, Any], device: torch.device, bytes_each: float) -> int:
    """Return how many of the shape's layers fit, at ``bytes_each`` for each parameter."""
    if device.type != "cuda":
        return int(config["num_hidden_layers"])
    free, _total = torch.cuda.mem_get_info(device)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    key_value = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    layer = 2 * hidden * hidden + 2 * hidden * key_value + 3 * hidden * inner
    around = 2 * hidden * config["vocab_size"]
    room = HELD_RATIO * free / bytes_each - around
    return max(1, min(int(config["num_hidden_layers"]), int(room / layer)))


def _generation_config(recorder: Recorder, scale: Scale) -> dict[str, Any]:
    layers = fitting_layers(scale.shape, recorder.device, 2.5)  # bf16, caches and workspaces
    return {**scale.shape, "num_hidden_layers": layers}


def _weight_only(recorder: Recorder, scale: Scale, batches: Sequence[int]) -> None:
    """Measure decode with the linear layers' weights in 4 and 8 bits."""
    config = _generation_config(recorder, scale)
    for kind in ("int4", "int8"):
        release_free_memory()
        with recorder.part(f"weights in {kind}"):
            model = _quantised(_made(config, recorder.device), kind)
            for batch in batches:
                _decode(recorder, model, config, scale, kind, batch)
            del model


def _plain(recorder: Recorder, scale: Scale, batches: Sequence[int]) -> None:
    """Measure decode in bf16, with the first batch size prefill too."""
    config = _generation_config(recorder, scale)
    model = _made(config, recorder.device)
    if batches[0] == scale.batches[0]:
        size, layers = float(model_bytes(model)), config["num_hidden_layers"]
        recorder.figure("model", "bytes", [size], f"{layers} layers in bf16")
        table = sum(map(tensor_bytes, model.get_input_embeddings().parameters()))
        read = size if config["tie_word_embeddings"] else size - table
        recorder.figure(READ_WEIGHTS, "bytes", [read], "all but the table of input embeddings")
        for tokens in scale.prefills:
            if recorder.has_time(f"prefill of {tokens}", 10):
                with recorder.part(f"prefill of {tokens}"):
                    _prefill(recorder, model, config, tokens)
    for batch in batches:
        _decode(recorder, model, config, scale, "bf16", batch)
    decode_speeds(recorder, model, batches, PROMPT_TOKENS, scale.output_tokens)


def _prefill(
    recorder: Recorder, model: PreTrainedModel, config: Mapping[str, Any], tokens: int
) -> None:
    speed = measure_speed(model, Workload(1, tokens, 1, seed=0), 3)
    recorder.figure(
        f"prefill of {tokens}",
        "tokens/s",
        [tokens / each.prefill_seconds for each in speed.repetitions],
        "one prompt, bf16",
        PlannerQuery(
            model=dict(config),
            workload={
                "kind": "generate",
                "batch_size": 1,
                "input_tokens": tokens,
                "output_tokens": 1,
            },
            strategy={"weight_dtype": "bf16"},
            metric="prefill_tokens_per_second",
        ),
    )


def _decode(
    recorder: Recorder,
    model: PreTrainedModel,
    config: Mapping[str, Any],
    scale: Scale,
    kind: str,
    batch: int,
) -> None:
    """Measure decode steps: compiled with CUDA graphs where there is a GPU, and eagerly."""
    name = f"decode {kind}, batch {batch}"
    if not recorder.has_time(name, 15):
        return
    with recorder.part(name):
        prompts = torch.randint(0, config["vocab_size"], (batch, PROMPT_TOKENS)).tolist()
        limits = AnswerLimits(scale.output_tokens)
        question = PlannerQuery(
            model=dict(config),
            workload={
                "kind": "generate",
                "batch_size": batch,
                "input_tokens": PROMPT_TOKENS,
                "output_tokens": scale.output_tokens,
            },
            strategy={"weight_dtype": kind},
            metric="decode_tokens_per_second",
        )
        ways: list[tuple[str, Callable[[], BatchRun]]] = [
            ("eager", lambda: run_batch(model, prompts, limits))
        ]
        step: CompiledStep | None = None
        if recorder.device.type == "cuda" and recorder.has_time(f"{name}, compiled", 60):
            step = CompiledStep(model, batch, PROMPT_TOKENS + scale.output_tokens)
            ways.append(("compiled", partial(step.run_batch, prompts, limits)))
        for way, generate in ways:
            planned: PlannerQuery | None = None
            if (way, kind) != NOT_PLANNED:
                planned = question.model_copy(update={"engine": ENGINES[way]})
            with recorder.part(f"{name}, {way}"):
                with (
                    _peak_memory(recorder, f"{name}, {way}", planned)
                    if planned is not None
                    else nullcontext()
                ):
                    generate()  # warm-up, and compilation
                with _energy(recorder, f"{name}, {way}") as count:
                    runs = _repeated(generate, recorder)
                    count(sum(batch * each.num_steps for each in runs))
                recorder.figure(
                    f"{name}, {way}",
                    "tokens/s",
                    [batch * each.num_steps / each.decode_seconds for each in runs],
                    f"after prompts of {PROMPT_TOKENS} tokens, {scale.output_tokens} tokens each",
                    planned,
                )
        if step is not None and step.plain_reason:
            recorder.check(
                f"{name}, compiled",
                is_met=False,
                expected="the step to compile",
                found=step.plain_reason,
                advice="Its figures are of the eager step; update torch and Triton.",
            )


def _repeated(generate: Callable[[], BatchRun], recorder: Recorder) -> list[BatchRun]:
    """Return three runs or more: so many that power is read over seconds."""
    began, runs = time.monotonic(), [generate()]
    seconds = METERED_SECONDS if recorder.device.type == "cuda" else 0.0
    while len(runs) < REPETITIONS or time.monotonic() < began + seconds:
        runs.append(generate())
    return runs


def _quantised(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """Return the model with its linear layers but the output's stored in 8 or 4 bits."""
    output: object = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if kind == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(
            model,
            Int8WeightOnlyConfig(),
            lambda module, _name: isinstance(module, torch.nn.Linear) and module is not output,
        )
        return model
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and module is not output:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, Int4Linear(module.weight.data))
    return model


@contextmanager
def _energy(recorder: Recorder, name: str) -> Iterator[Callable[[float], None]]:
    """Compare NVML's energy counter with power times time, and record joules per token."""
    tokens: list[float] = []
    meter = _Meter.of(recorder.device)
    if meter is None:
        yield tokens.append
        return
    with meter:
        yield tokens.append
        wait_for(recorder.device)
    if meter.counted and tokens and meter.integrated:
        recorder.figure(f"energy, {name}", "J/token", [meter.counted / tokens[0]])
        ratio = meter.counted / meter.integrated
        recorder.check(
            f"energy, {name}",
            is_met=ENERGY_RATIOS[0] <= ratio <= ENERGY_RATIOS[1],
            expected="NVML's energy counter within a quarter of power times time",
            found=f"{meter.counted:.0f} J counted, {meter.integrated:.0f} J integrated",
            advice="Figures of joules per token of this host are not reliable.",
        )


class _Meter:
    """Integrates the power of one GPU over a block, beside its own energy counter."""

    def __init__(self, handle: object) -> None:
        self._handle = handle
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._integrate, daemon=True)
        self.counted = self.integrated = 0.0

    @classmethod
    def of(cls, device: torch.device) -> "_Meter | None":
        """Return a meter of a CUDA device, or None without NVML or its counter."""
        if device.type != "cuda":
            return None
        try:
            import pynvml

            pynvml.nvmlInit()
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        except Exception:  # noqa: BLE001 - without a counter there is nothing to compare
            return None
        return cls(handle)

    def __enter__(self) -> None:
        self._began = self._joules()
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.counted = self._joules() - self._began
        self._ended.set()
        self._thread.join()

    def _joules(self) -> float:
        import pynvml

        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1000

    def _integrate(self) -> None:
        import pynvml

        last = time.perf_counter()
        while not self._ended.wait(POWER_SECONDS):
            now = time.perf_counter()
            watts = float(pynvml.nvmlDeviceGetPowerUsage(self._handle)) / 1000
            self.integrated += watts * (now - last)
            last = now


def _training(recorder: Recorder, scale: Scale, folder: Path) -> None:
    """Measure steps of full fine-tuning with full recomputation, as the trainer runs them."""
    from runners.jobs.train.trainer import random_token_trainer

    device = recorder.device
    # fp32 weights, gradients and two moments; activations of one layer at a time.
    layers = min(scale.training_layers, fitting_layers(scale.shape, device, 18.0))
    config = {**scale.shape, "num_hidden_layers": layers, "tie_word_embeddings": True}
    fields = {
        "sequence_length": scale.training_tokens,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_steps": 1000,
        "time_budget_seconds": None,
        "compute_dtype": "bf16",
        "activation_recomputation": "full",
    }
    question = PlannerQuery(
        model=config,
        workload={
            "kind": "train",
            "sequence_length": scale.training_tokens,
            "global_batch_size": 2,
            "method": "full",
        },
        strategy={
            "micro_batch_size": 2,
            "compute_dtype": "bf16",
            "activation_recomputation": "full",
        },
        metric="step_seconds",
    )
    place = folder / "training"
    place.mkdir(exist_ok=True)
    tokens = 2 * scale.training_tokens
    with _peak_memory(recorder, "training step", question):
        with device:
            model = fresh_model(dict(config), torch.float32)
        trainer = random_token_trainer(fields, config, place, model=model, device=device)
        trainer.model.train()
        trainer.layout.begin()
        trainer.make_step()  # states are made, kernels chosen
        times = run_seconds(trainer.make_step, device, 3.0, most=10)
    recorder.figure("training step", "s", times, f"{layers} layers, {tokens} tokens", question)
    work = training_flops(config, scale.training_tokens, tokens)
    recorder.figure(
        "training, model FLOP/s",
        "op/s",
        [work / each for each in times],
        "6 per weight and token, and causal attention; recomputation is not counted",
    )


def training_flops(config: Mapping[str, Any], length: int, tokens: int) -> float:
    """Return the FLOPs of forward and backward of ``tokens`` in rows of ``length``.

    Source: Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, appendix B; attention counts half of
    the pairs, because it is causal. The embedding is a look-up, the output a product.
    """
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    key_value = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    layer = 2 * hidden * hidden + 2 * hidden * key_value + 3 * hidden * inner
    weights = config["num_hidden_layers"] * layer + hidden * config["vocab_size"]
    attention = config["num_hidden_layers"] * 12 * hidden * length / 2
    return float(tokens * (6 * weights + attention))


def _compression(recorder: Recorder, scale: Scale, method: str) -> None:
    """Time one method on one square matrix of the shape, with its calibration statistics."""
    from runners.jobs.compress.layer_methods import METHODS
    from runners.jobs.compress.quantization import InputStatistics
    from runners.jobspec import CompressSpec, DemoModel

    size, device = scale.compressed_rows, recorder.device
    options: dict[str, Any] = {} if method == "sparsegpt" else {"bits": 4, "group_size": 128}
    spec = CompressSpec.model_validate({"model": DemoModel(), "method": method, **options})
    weight = torch.randn(size, size, device=device) / size**0.5
    statistics = InputStatistics(size)
    statistics.add(torch.randn(2 * size, size, device=device))
    began = time.perf_counter()
    matrix = METHODS[spec.method](weight.clone(), statistics, spec)
    wait_for(device)
    seconds = time.perf_counter() - began
    change = (matrix.weight().to(device).float() - weight) @ torch.randn(size, 8, device=device)
    if not bool(change.isfinite().all()):
        msg = f"{method} gave weights that are not finite"
        raise BadInputError(msg)
    recorder.figure(f"{method} of a matrix", "s", [seconds], f"{size} x {size}")
