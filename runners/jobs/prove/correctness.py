"""Stage "correctness": kernels, layers and training paths against exact references.

Kernels are compared with float64 on the CPU, from the same rounded operands, so that only the
rounding of the kernel itself remains: about 2**-9 of the result's norm in bf16. An error of 1e-2
exceeds every tolerance. Training paths are compared with the plain path on the same device.
"""

import shutil
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from runners.jobs.adapters import Lora
from runners.jobs.bench.device_rates import UnsupportedDtypeError, product_of
from runners.jobs.loading import fresh_model, ready
from runners.jobs.prove.recorder import Recorder
from runners.jobs.prove.weight_only import (
    WeightKind,
    dequantised_int4,
    exact_product,
    linear_with,
    nf4_linear,
    product_with,
)
from runners.jobs.runtime import check_compiler
from runners.jobs.train.trainer import Trainer, random_token_trainer
from runners.jobspec.base import LoraOptions
from runners.supervision.child import compiler_name

# Norm of the error over the norm of the exact result.
TOLERANCES: Mapping[str, float] = {
    "fp32": 2e-6,
    "tf32": 1e-3,  # operands rounded to 10 bits
    "bf16": 4e-3,
    "fp16": 1e-3,
    "fp8": 4e-3,  # of the operands as rounded; the output is bf16
    "int8": 0.0,
}
WEIGHT_ONLY_TOLERANCE = 5e-3  # of the product with the dequantised weights, in bf16
# Norm of the change of the weights by quantisation, over their norm: normal weights, 4 bits in
# groups and 8 bits per row.
QUANTISATION_ERRORS: Mapping[str, float] = {
    "bf16": 4e-3,
    "int8": 1.5e-2,
    "int4": 0.13,
    "nf4": 0.12,
}
COMPILED_TOLERANCE = 1e-5  # in fp32: in bf16 both ways round, each otherwise
# The CPU's AdamW rounds otherwise than the GPU's. Compared in fp32: where products are in bf16, a
# weight that differs in its last bit may round to the other neighbour, and an AdamW step divides
# by the gradient's size, so that 6e-8 of the weights became 1.4e-3 after four steps.
OFFLOAD_TOLERANCE = 1e-5
STEPS = 4
KERNEL = "Update the driver and torch; run the same product on another device of this kind. "
OTHER_DEVICE = "If only this device is off, have it replaced."
SHAPE: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
TRAINING: Mapping[str, Any] = {
    "sequence_length": 64,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": STEPS,
    "time_budget_seconds": None,
    "compute_dtype": "bf16",
    "learning_rate": 1e-3,
}


class TrainedWeights(NamedTuple):
    """Weights after a few steps, on the CPU, and the last loss."""

    weights: dict[str, torch.Tensor]
    loss: float


def run(recorder: Recorder, folder: Path) -> None:
    """Check kernels, quantised layers, compilation and training paths on the device."""
    torch.manual_seed(0)
    for name in TOLERANCES:
        with recorder.part(f"matmul {name}"):
            _product(recorder, name)
    for dtype in (torch.float32, torch.bfloat16):
        with recorder.part("attention sdpa"):
            _attention(recorder, dtype)
    if recorder.device.type == "cuda":
        with recorder.part("attention flex"):
            _flex(recorder)
    for kind in get_args(WeightKind):
        with recorder.part(f"weight-only {kind}"):
            _weight_only(recorder, kind)
    with recorder.part("serving decode step"):
        _serving_decode(recorder)
    for name, compare in (
        ("compiled model", _compiled),
        ("compiled decode step", _compiled_decode),
    ):
        if shutil.which(compiler_name()) is None:
            why = f"{compiler_name()} is not installed, which compiled kernels need"
            recorder.missing(name, why, "Install a C++ compiler.", "library")
        elif recorder.has_time(name, 30):
            with recorder.part(name):
                compare(recorder, folder)
    if recorder.has_time("training paths", 20):
        _training(recorder, folder)


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the norm of the error over the norm of the exact result; NaN counts as infinite."""
    error = (found.double().cpu() - exact).norm() / exact.norm()
    return float(error) if bool(error.isfinite()) else float("inf")


def _compare(
    recorder: Recorder, name: str, error: float, tolerance: float, advice: str = ""
) -> None:
    recorder.check(
        name,
        is_met=error <= tolerance,
        expected=f"a relative error of at most {tolerance:.1e}",
        found=f"{error:.1e}",
        advice=advice or KERNEL + OTHER_DEVICE,
    )


def _product(recorder: Recorder, name: str) -> None:
    size = 64 if recorder.is_small else 512
    try:
        product = product_of(name, recorder.device, size)
    except UnsupportedDtypeError:
        return  # the stage "rates" says why
    exact = product.left.double().cpu() @ product.right.double().cpu()
    _compare(
        recorder, f"matmul {name}", relative_error(product.compute(), exact), TOLERANCES[name]
    )


def _attention(recorder: Recorder, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    q, k, v = _heads(recorder, dtype)
    found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    tolerance = 4e-3 if dtype == torch.bfloat16 else 1e-5
    error = relative_error(found, _exact_attention(q, k, v))
    _compare(recorder, f"attention sdpa {name}", error, tolerance)


def _flex(recorder: Recorder) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = _heads(recorder, torch.bfloat16)
    length = q.shape[2]
    mask = create_block_mask(
        lambda _b, _h, query, key: query >= key, None, None, length, length, str(q.device)
    )
    found = torch.compile(flex_attention)(q, k, v, block_mask=mask)
    _compare(
        recorder,
        "attention flex",
        relative_error(found, _exact_attention(q, k, v)),
        4e-3,
    )


def _heads(recorder: Recorder, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    length = 64 if recorder.is_small else 384
    whole = torch.randn(3, 2, 4, length, 64, device=recorder.device).to(dtype)
    return whole.unbind()


def _exact_attention(*heads: torch.Tensor) -> torch.Tensor:
    """Return causal attention in float64 on the CPU, written out."""
    q, k, v = (each.double().cpu() for each in heads)
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    exact: torch.Tensor = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
    return exact


def _weight_only(recorder: Recorder, kind: WeightKind) -> None:
    weight = torch.randn(512, 256, device=recorder.device) / 16
    inputs = torch.randn(8, 256, device=recorder.device, dtype=torch.bfloat16)
    layer = linear_with(kind, weight)
    held = _held_weight(layer, kind, weight)
    error = relative_error(product_with(layer, inputs), exact_product(inputs, held))
    _compare(recorder, f"weight-only {kind}", error, WEIGHT_ONLY_TOLERANCE)
    change = relative_error(held, weight.double().cpu())
    _compare(recorder, f"quantisation error of {kind}", change, QUANTISATION_ERRORS[kind])


def _held_weight(layer: torch.nn.Module, kind: WeightKind, weight: torch.Tensor) -> torch.Tensor:
    """Return the weight that the layer multiplies with, in float64."""
    if kind == "int4":
        return dequantised_int4(weight)
    stored: Any = next(layer.parameters())
    if kind == "nf4":
        from bitsandbytes.functional import dequantize_4bit

        wide: torch.Tensor = dequantize_4bit(stored.data, stored.quant_state)
        return wide.double()
    plain: torch.Tensor = stored.dequantize() if kind == "int8" else stored
    return plain.double()


def _compiled(recorder: Recorder, folder: Path) -> None:
    check_compiler(folder / "kernels", "torch.compile")
    model = ready(fresh_model(dict(SHAPE), torch.float32), device=recorder.device)
    ids = torch.randint(0, SHAPE["vocab_size"], (2, 16), device=recorder.device)
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits
        compiled = torch.compile(model)(input_ids=ids, use_cache=False).logits
    error = relative_error(compiled, plain.double().cpu())
    _compare(recorder, "compiled model", error, COMPILED_TOLERANCE)


def _compiled_decode(recorder: Recorder, folder: Path) -> None:
    """Compare the tokens of the compiled step, a CUDA graph on a GPU, with the eager ones."""
    from runners.jobs.generate.batching import CompiledStep
    from runners.jobs.generate.static import AnswerLimits, run_batch

    check_compiler(folder / "kernels", "compiled_step")
    model = ready(fresh_model(dict(SHAPE), torch.float32), device=recorder.device)
    prompts, limits = ((1, 2, 3), (4, 5, 6, 7, 8)), AnswerLimits(8)
    eager = [each.ids for each in run_batch(model, prompts, limits).answers]
    step = CompiledStep(model, len(prompts), 32)
    compiled = [each.ids for each in step.run_batch(prompts, limits).answers]
    recorder.check(
        "compiled decode step",
        is_met=compiled == eager and not step.plain_reason,
        expected=f"the tokens of the eager step, {eager}",
        found=step.plain_reason or str(compiled),
        advice="Leave compiled_step out on this host; report this with the file.",
    )


def _serving_decode(recorder: Recorder) -> None:
    """Compare the serving engine's padded decode step, CUDA graphs on a GPU, with eager steps."""
    from runners.jobs.prove.serving import check_tokens

    check_tokens(recorder, ready(fresh_model(dict(SHAPE), torch.float32), device=recorder.device))


# Training


def _training(recorder: Recorder, folder: Path) -> None:
    train = partial(_trained, recorder.device, folder)
    plain: list[TrainedWeights] = []
    with recorder.part("training steps"):
        plain.append(train({}))
        again = train({})
        _equal(recorder, "two equal trainings", plain[0], again, 0.0)
    if not plain:
        return
    with recorder.part("checkpoint", advice="Check the disk; compare with another folder."):
        _equal(recorder, "resumed from a checkpoint", plain[0], _resumed(recorder, folder), 0.0)
    places = ("cpu", "disk") if recorder.device.type == "cuda" else ("disk",)
    in_fp32 = {"compute_dtype": "fp32"}
    with recorder.part("optimiser offload"):
        exact = train(in_fp32)
        for each in places:
            found = train({**in_fp32, "optimizer_offload": each})
            name = f"optimiser states in {_place(each)}"
            _equal(recorder, name, exact, found, OFFLOAD_TOLERANCE)
    paths = [("activation recomputation", {"activation_recomputation": "full"})]
    paths += [(f"activations in {_place(each)}", {"activation_offload": each}) for each in places]
    for name, fields in paths:
        with recorder.part(name):
            _equal(recorder, name, plain[0], train(fields), 0.0)
    with recorder.part("lora step"):
        _lora(recorder, "lora")
    with recorder.part("qlora step"):
        _lora(recorder, "qlora")


def _place(where: str) -> str:
    return {"cpu": "host memory", "disk": "a file"}[where]


def _trained(device: torch.device, folder: Path, fields: Mapping[str, Any]) -> TrainedWeights:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        trainer = random_token_trainer({**TRAINING, **fields}, SHAPE, Path(place), device=device)
        return _after(trainer, STEPS)


def _resumed(recorder: Recorder, folder: Path) -> TrainedWeights:
    """Train half of the steps, save, and train the rest in a new trainer."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        first = random_token_trainer(TRAINING, SHAPE, Path(place), device=recorder.device)
        _after(first, STEPS // 2)
        first.checkpoint()
        second = random_token_trainer(TRAINING, SHAPE, Path(place), device=recorder.device)
        second.resume()
        return _after(second, STEPS - STEPS // 2)


def _after(trainer: Trainer, steps: int) -> TrainedWeights:
    trainer.model.train()
    trainer.layout.begin()
    for _ in range(steps):
        trainer.make_step()
        trainer.state.step += 1
    named = trainer.model.named_parameters()
    weights = {name: each.detach().cpu().clone() for name, each in named}
    return TrainedWeights(weights, float(trainer.last_loss))


def _equal(
    recorder: Recorder,
    name: str,
    expected: TrainedWeights,
    found: TrainedWeights,
    tolerance: float,
) -> None:
    apart = max(
        relative_error(found.weights[key], each.double()) for key, each in expected.weights.items()
    )
    recorder.check(
        name,
        is_met=apart <= tolerance,
        expected="the same weights after 4 steps"
        + (f", within {tolerance:.0e}" if tolerance else ", bit for bit"),
        found=f"a relative difference of {apart:.1e}, loss {found.loss:.4f} "
        f"for {expected.loss:.4f}",
        advice="Jobs that use this path would train another model; report this with the file.",
    )


def _lora(recorder: Recorder, kind: str) -> None:
    """Take steps on one batch: the loss falls, and the frozen weights stay as they were."""
    model = ready(fresh_model(dict(SHAPE), torch.float32), device=recorder.device)
    if kind == "qlora":
        model = _in_nf4(model)
    Lora(model, LoraOptions(rank=4, alpha=8))
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    ids = torch.randint(0, SHAPE["vocab_size"], (2, 64), device=recorder.device)
    losses: list[float] = []
    for _ in range(2 * STEPS):
        with torch.autocast(recorder.device.type, dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    recorder.check(
        f"{kind}: the loss falls",
        is_met=losses[-1] < losses[0] - 0.05,
        expected="a lower loss after 8 steps on one batch",
        found=f"{losses[-1]:.3f} after {losses[0]:.3f}",
    )
    changed = [n for n, p in model.named_parameters() if n in frozen and not p.equal(frozen[n])]
    recorder.check(
        f"{kind}: frozen weights stay",
        is_met=not changed,
        expected="no change of the frozen weights",
        found=f"{len(changed)} of {len(frozen)} changed",
    )


def _in_nf4(model: PreTrainedModel) -> PreTrainedModel:
    """Replace the linear layers but the output by bitsandbytes' nf4, as QLoRA jobs load them."""
    for name, module in list(model.named_modules()):
        if not isinstance(module, torch.nn.Linear) or name == "lm_head":
            continue
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, nf4_linear(module))
    for parameter in model.parameters():
        parameter.requires_grad = False
    return model
