"""Benchmarks the time of training techniques on one core, in alternating rounds.

Uses process CPU time; only ratios within a round are meaningful.
"""

import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from runners.jobs.corpus import Corpus, load_corpus
from runners.jobs.evaluation import evaluate
from runners.jobs.live_bytes import activations_counted
from runners.jobs.ratios import ratio_of
from runners.jobs.tokenizer import TokenIds
from runners.jobs.train.quiet import quiet_trainer
from runners.jobs.train.trainer import Trainer
from runners.jobspec.training_memory import Recomputation
from runners.ratios import Ratio

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
LENGTH, ROWS = 512, 4
GROWING = (
    (64, 0.25),
    (128, 0.25),
    (256, 0.25),
    (512, 0.25),
)  # starting at an eighth, as in the paper
STEPS = 48
LEARNING_RATE = 3e-3
JUDGED_TOKENS = 8_192
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
        fields = {"seed": seed, "max_steps": steps, **_fields(LENGTH, ROWS)}
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
    fields = {**_fields(LENGTH // 2, 2 * ROWS), "max_steps": 1000}
    trainer = quiet_trainer({**fields, "activation_recomputation": how}, CONFIG, folder / how)
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
        trainer = quiet_trainer(fields, CONFIG, Path(folder), ids=learnt)
        trainer.model.train()
        trainer.layout.begin()
        began = time.process_time()
        while trainer.pace.fraction(trainer.state) < 1.0:
            trainer.make_step()
            trainer.state.step += 1
        seconds = time.process_time() - began
    torch.nn.Module.eval(trainer.model)
    return Run(seconds, math.log(evaluate(trainer.model, held_out, JUDGED_TOKENS).value))


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
