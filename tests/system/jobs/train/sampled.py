"""Trainings that write samples and are judged on the way, and the same ones that do neither.

``python -m tests.system.jobs.train.sampled FOLDER [CASE]``: those of one number of forked gloo
ranks one after the other.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from runners.jobs.ranks import Ranks
from runners.jobs.train.evaluator import (
    VALIDATIONS_PER_RUN,
    EvaluatedStep,
    TextSampler,
    prompts_of,
)
from runners.jobspec.base import TextSamples
from tests.system.jobs.train.forked import forked
from tests.system.jobs.train.killed import size_of
from tests.system.jobs.train.laid_out import (
    LESS,
    LLAMA,
    MODELS,
    SHARED,
    Seen,
    import_what_training_imports,
    model_of,
    trainer_of,
)

STEPS, EVERY = 4, 1  # no step is far enough to be looked at by a profiler
LOCAL = "local"
DROPS = "alone, with dropout"
MODELS["dropping"] = {**LLAMA, "attention_dropout": 0.2}
CASES: dict[str, dict[str, Any]] = {
    "alone": {},
    DROPS: {},
    LOCAL: LESS["local"],
    "context": {"context_parallel_size": 2},
    **SHARED,
}


def word_tokenizer(size: int = 128) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose words are w0, w1 and so on."""
    model = WordLevel({f"w{at}": at for at in range(size)}, unk_token="w0")
    inner = Tokenizer(model)
    inner.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def train(name: str, ranks: Ranks, folder: Path, *, looks: bool) -> dict[str, Any]:
    """Train to the end, with samples and validations or without; return what this rank saw."""
    asked = TextSamples(
        every_steps=EVERY, prompts=("w0 w5 w10", "w7"), max_tokens=6, temperature=0.7
    )
    model = "dropping" if name == DROPS else model_of(name)
    options = CASES[name] or None
    trainer: Seen = trainer_of(
        model, options, ranks, folder, max_steps=STEPS, gradient_accumulation_steps=2,
        text_samples=asked if looks else None,
    )  # fmt: skip
    tokenizer = word_tokenizer()
    if looks:
        prompts = prompts_of(asked, tokenizer, None, trainer.held_out.ids)
        trainer.evaluator.sampler = TextSampler(trainer.job, asked, tokenizer, prompts, 16)
    if looks and name != LOCAL:  # a validation of copies that part is one meeting more
        trainer.evaluator.next_validation = 1.0 / VALIDATIONS_PER_RUN
    trainer.run()
    draw = float(torch.rand(()))
    found = {"losses": [each["loss"] for each in trainer.values], "draw": draw}
    whole = trainer.layout.gathered_model()
    if whole is not None and trainer.evaluator.sampler is not None:
        trainer.model = whole
        last = {key: each.detach().clone() for key, each in whole.named_parameters()}
        judge = trainer.evaluator
        judge.best.take(whole, judge.best.last or _evaluated(trainer))
        judge.finish(whole, trainer.state)
        found["samples"] = [vars(each) for each in judge.sampler.taken]
        found["best"] = vars(judge.best.exported) if judge.best.exported else None
        found["is_back"] = any(
            not torch.equal(last[key], each) for key, each in whole.named_parameters()
        )
    return found


def _evaluated(trainer: Seen) -> EvaluatedStep:
    found = trainer.held_out.validation(trainer.model)
    return EvaluatedStep(trainer.state.step, found["validation_loss"])


def _on_rank(name: str, ranks: Ranks, folder: Path) -> None:
    found = {}
    for word, looks in {"plain": False, "looked at": True}.items():
        torch.manual_seed(5)
        found[word] = train(name, ranks, folder / f"{word}-{ranks.rank}", looks=looks)
    (folder / f"{ranks.rank}.json").write_text(json.dumps(found))


def run(names: Sequence[str], size: int, folder: Path) -> list[int]:
    """Run cases on forked ranks, one after the other; return how each rank ended."""

    def on_rank(ranks: Ranks) -> None:
        for name in names:
            _on_rank(name, ranks, folder / name)

    return forked(size, on_rank)


def main() -> None:
    """Run all cases, or those named, below the folder."""
    torch.set_num_threads(1)
    import_what_training_imports()
    folder, names = Path(sys.argv[1]), sys.argv[2:] or list(CASES)
    for size in sorted({size_of(CASES[name]) for name in names}):
        alike = [name for name in names if size_of(CASES[name]) == size]
        if any(ends := run(alike, size, folder)):
            sys.exit(f"{size} ranks ended with {ends}")


if __name__ == "__main__":
    main()
