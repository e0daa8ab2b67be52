"""Benchmarks memory and time of training techniques (run with ``python -m``)."""

import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from runners.host.bench import Ratio
from runners.jobs.adapters import Lora
from runners.jobs.corpus import Corpus, TokenIds, load_corpus
from runners.jobs.evaluation import evaluate
from runners.jobs.loading import demo_config, fresh_model
from runners.jobs.memory import (
    LiveBytes,
    activations_counted,
    gradient_bytes,
    model_bytes,
    optimizer_bytes,
)
from runners.jobs.ratios import ratio_of
from runners.jobs.runtime import prepare_process
from runners.jobs.train.optimizers import build_optimizer
from runners.jobs.train.trainer import (
    ActivationSwap,
    Trainer,
    offloaded_activations,
    random_token_trainer,
    recompute,
)
from runners.jobspec import DemoModel
from runners.jobspec.base import LoraOptions
from runners.jobspec.train import Away, Optimizer, Recomputation

# Benchmarks the time of training techniques on one core, in alternating rounds.
#
# Uses process CPU time; only ratios within a round are meaningful.


ROUNDS = 5
Each = TypeVar("Each")
BYTES = 256  # a vocabulary that needs no tokenizer
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": BYTES,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
LENGTH, PACE_ROWS = 512, 4
GROWING = (
    (64, 0.25),
    (128, 0.25),
    (256, 0.25),
    (512, 0.25),
)  # starting at an eighth, as in the paper
STEPS = 48
LEARNING_RATE = 3e-3
EVALUATED_TOKENS = 8_192
WAYS: tuple[Recomputation, ...] = ("none", "selective", "full")
STEPS_TIMED = 2


class Run(NamedTuple):
    """One training's CPU seconds and held-out loss."""

    seconds: float
    loss: float


def growing_ratios(rounds: int = ROUNDS, steps: int = STEPS) -> Iterator[Ratio]:
    """Yield the savings of growing lengths at equal tokens; each round has new weights."""
    corpus = load_corpus()
    learnt, held_out = (_bytes_of(corpus, is_held_out=each) for each in (False, True))
    whole: list[Run] = []
    growing: list[Run] = []
    ways: tuple[dict[str, Any], ...] = ({}, {"length_schedule": GROWING})
    for seed in range(rounds):
        fields = {"seed": seed, "max_steps": steps, **_fields(LENGTH, PACE_ROWS)}
        trained = [_trained({**fields, **each}, learnt, held_out) for each in _turned(ways, seed)]
        first, second = _turned(trained, seed)
        whole.append(first)
        growing.append(second)
    names = ("whole / growing lengths, time", "whole / growing lengths, loss")
    for name, field in zip(names, Run._fields, strict=True):
        one, other = ([getattr(each, field) for each in runs] for runs in (whole, growing))
        ratio = ratio_of(name, one, other)
        yield ratio if field == "seconds" else ratio._replace(of="nats a token")


def recomputation_ratios(rounds: int = ROUNDS) -> Iterator[Ratio]:
    """Yield the time cost of recomputation, and its savings in bytes times time."""
    taken: dict[Recomputation, list[float]] = {each: [] for each in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        trainers = {each: _recomputing(each, Path(folder)) for each in WAYS}
        activation_bytes = {each: _activations(trainer) for each, trainer in trainers.items()}
        for number in range(rounds):
            for each in _turned(WAYS, number):
                began = time.process_time()
                for _ in range(STEPS_TIMED):
                    trainers[each].make_step()
                taken[each].append(time.process_time() - began)
    for how in WAYS[1:]:
        ratio = ratio_of(f"kept / {how} recomputation's seconds", taken["none"], taken[how])
        yield ratio
        spared = activation_bytes["none"] / activation_bytes[how]
        yield ratio._replace(
            name=f"kept / {how} recomputation's bytes times seconds",
            value=spared * ratio.value,
            low=spared * ratio.low,
            high=spared * ratio.high,
            of="bytes x processor seconds",
        )


def _recomputing(how: Recomputation, folder: Path) -> Trainer:
    fields = {**_fields(LENGTH // 2, 2 * PACE_ROWS), "max_steps": 1000}
    trainer = random_token_trainer(
        {**fields, "activation_recomputation": how}, CONFIG, folder / how
    )
    trainer.model.train()
    trainer.layout.begin()
    return trainer


def _activations(trainer: Trainer) -> int:
    """Return the peak activation bytes of a step; the trainer counts only its first step."""
    trainer.make_step()
    with activations_counted(trainer.model) as live:
        trainer.make_step()
    return live.peak


def _trained(fields: Mapping[str, Any], learnt: TokenIds, held_out: TokenIds) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        trainer = random_token_trainer(fields, CONFIG, Path(folder), ids=learnt)
        trainer.model.train()
        trainer.layout.begin()
        began = time.process_time()
        while trainer.pace.fraction(trainer.state) < 1.0:
            trainer.make_step()
            trainer.state.step += 1
        seconds = time.process_time() - began
    torch.nn.Module.eval(trainer.model)
    return Run(seconds, math.log(evaluate(trainer.model, held_out, EVALUATED_TOKENS).value))


def _fields(length: int, rows: int) -> dict[str, Any]:
    return {
        "sequence_length": length,
        "micro_batch_size": rows,
        "gradient_accumulation_steps": 1,
        "time_budget_seconds": None,
        "compute_dtype": "fp32",
        "learning_rate": LEARNING_RATE,
    }


def _bytes_of(corpus: Corpus, *, is_held_out: bool) -> TokenIds:
    documents = corpus.held_out if is_held_out else corpus.train
    text = "\n".join(each.text for each in documents).encode()
    return np.frombuffer(text, dtype=np.uint8).astype(np.int32)


def _turned(those: Sequence[Each], number: int) -> list[Each]:
    """Return the items, in reverse order every other round to balance cache effects."""
    return list(those) if number % 2 == 0 else list(reversed(those))


RANK = 8
TOKENS = 32
ROWS = 8  # of text per step with counted activations


class StepMemory(NamedTuple):
    """The memory of one training step besides weights and activations."""

    trained_parameters: float
    gradients: float
    optimizer_states: float


def ratios(shape: DemoModel | None = None, rank: int = RANK) -> Iterator[Ratio]:
    """Yield the ratios of full fine-tuning to adapter training."""
    shape = shape or DemoModel()
    full, adapter = (
        memory_after_step(shape, None),
        memory_after_step(shape, LoraOptions(rank=rank, alpha=2 * rank)),
    )
    yield Ratio.exact(
        "full / LoRA trained parameters",
        full.trained_parameters,
        adapter.trained_parameters,
        "parameters",
    )
    yield Ratio.exact("full / LoRA gradients", full.gradients, adapter.gradients, "bytes")
    yield Ratio.exact(
        "full / LoRA optimiser states", full.optimizer_states, adapter.optimizer_states, "bytes"
    )


class Step(NamedTuple):
    """Peak tensor bytes of two steps: in total, and of activations."""

    peak: float
    activations: float
    optimizer_states: float


def fitting_ratios(shape: DemoModel | None = None, rows: int = ROWS) -> Iterator[Ratio]:
    """Yield the ratios of plain to memory-saving training with equal gradients."""
    shape = shape or DemoModel()
    plain = step_of(shape, rows)
    adamw, lomo = step_of(shape, 1, "adamw", "full"), step_of(shape, 1, "lomo", "full")
    yield Ratio.exact("AdamW / LOMO peak of a step", adamw.peak, lomo.peak, "bytes")
    eight_bit: tuple[tuple[Optimizer, str], ...] = (
        ("adamw_8bit", "AdamW 8-bit"),
        ("lion_8bit", "Lion 8-bit"),
    )
    for name, title in eight_bit:
        small = step_of(shape, 1, name).optimizer_states
        yield Ratio.exact(f"AdamW / {title} states", plain.optimizer_states, small, "bytes")
    ways: tuple[Recomputation, ...] = ("selective", "full")
    for how in ways:
        again = step_of(shape, rows, how=how)
        yield Ratio.exact(
            f"kept / {how} recomputation's activations",
            plain.activations,
            again.activations,
            "bytes",
        )
    swapped = step_of(shape, rows, where="disk")
    yield Ratio.exact(
        "kept / swapped activations", plain.activations, swapped.activations, "bytes"
    )


def step_of(
    shape: DemoModel,
    rows: int,
    name: Optimizer = "adamw",
    how: Recomputation = "none",
    where: Away = "none",
) -> Step:
    """Return the memory of two steps over ``rows`` rows of text."""
    torch.manual_seed(0)
    model = fresh_model(demo_config(shape), torch.float32).train()
    model.set_attn_implementation("eager")
    recompute(model, how)
    optimizer = build_optimizer(model, 1e-3, name)
    length = shape.max_position_embeddings
    ids = torch.arange(rows * length).reshape(rows, length) % shape.vocab_size
    with TemporaryDirectory() as folder, LiveBytes(model.parameters()) as live:
        swap = offloaded_activations(where, model, torch.device("cpu"), Path(folder))
        activations = [_step(model, optimizer, ids, swap) for _ in range(2)][-1]
    states = optimizer_bytes(optimizer)
    return Step(float(live.peak + model_bytes(model)), float(activations), float(states))


def _step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    ids: torch.Tensor,
    swap: ActivationSwap,
) -> int:
    """Run one step on the text and return its peak activation bytes."""
    with activations_counted(model) as counted, swap.step():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=ids, use_cache=False).logits
        wide = logits.float().flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(wide, ids.flatten())
        del logits, wide
        torch.autograd.backward(loss)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return counted.peak


def memory_after_step(shape: DemoModel, options: LoraOptions | None) -> StepMemory:
    """Return the memory after one step, with or without an adapter."""
    model = fresh_model(demo_config(shape), torch.float32)
    if options is not None:
        Lora(model, options)
    optimizer = build_optimizer(model, 1e-3)
    ids = torch.arange(TOKENS)[None]
    torch.autograd.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)
    gradients = gradient_bytes(model)
    optimizer.step()
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    return StepMemory(float(trained), float(gradients), float(optimizer_bytes(optimizer)))


if __name__ == "__main__":
    prepare_process()
    torch.set_num_threads(1)
    for each in chain(ratios(), fitting_ratios(), recomputation_ratios(), growing_ratios()):
        sys.stdout.write(json.dumps(each) + "\n")
