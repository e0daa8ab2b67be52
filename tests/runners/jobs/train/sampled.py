"""Trainings that write samples and are judged on the way, and the same ones that do neither.

``python -m tests.runners.jobs.train.sampled FOLDER [CASE]``: each case on forked gloo ranks.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from runners.jobs.ranks import Ranks
from runners.jobs.train.best import JudgedStep
from runners.jobs.train.judge import VALIDATIONS_PER_RUN
from runners.jobs.train.text_samples import Sampler, prompts_of
from runners.jobspec.text_samples import TextSamples
from tests.runners.jobs.train.forked import forked
from tests.runners.jobs.train.killed import size_of
from tests.runners.jobs.train.laid_out import (
    LESS,
    LLAMA,
    MODELS,
    SHARED,
    Seen,
    import_what_training_imports,
    model_of,
    trainer_of,
)

STEPS, EVERY = 9, 2
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
        model, options, ranks, folder, max_steps=STEPS, text_samples=asked if looks else None
    )
    tokenizer = word_tokenizer()
    if looks:
        prompts = prompts_of(asked, tokenizer, None, trainer.held_out.ids)
        trainer.judge.sampler = Sampler(trainer.job, asked, tokenizer, prompts, 16)
    if looks and name != LOCAL:  # a validation of copies that part is one meeting more
        trainer.judge.next_validation = 1.0 / VALIDATIONS_PER_RUN
    trainer.run()
    draw = float(torch.rand(()))
    found = {"losses": [each["loss"] for each in trainer.values], "draw": draw}
    whole = trainer.layout.whole()
    if whole is not None and trainer.judge.sampler is not None:
        trainer.model = whole
        last = {key: each.detach().clone() for key, each in whole.named_parameters()}
        judge = trainer.judge
        judge.best.take(whole, judge.best.last or _judged(trainer))
        judge.finish(whole, trainer.state)
        found["samples"] = [vars(each) for each in judge.sampler.taken]
        found["best"] = vars(judge.best.exported) if judge.best.exported else None
        found["is_back"] = any(
            not torch.equal(last[key], each) for key, each in whole.named_parameters()
        )
    return found


def _judged(trainer: Seen) -> JudgedStep:
    found = trainer.held_out.validation(trainer.model)
    return JudgedStep(trainer.state.step, found["validation_loss"])


def _on_rank(name: str, ranks: Ranks, folder: Path) -> None:
    found = {}
    for word, looks in {"plain": False, "looked at": True}.items():
        torch.manual_seed(5)
        found[word] = train(name, ranks, folder / f"{word}-{ranks.rank}", looks=looks)
    (folder / f"{ranks.rank}.json").write_text(json.dumps(found))


def run(name: str, folder: Path) -> list[int]:
    """Run a case on forked ranks; return how each ended."""
    folder.mkdir(parents=True)
    return forked(size_of(CASES[name]), lambda ranks: _on_rank(name, ranks, folder))


def main() -> None:
    """Run all cases, or those named, below the folder."""
    torch.set_num_threads(1)
    import_what_training_imports()
    for name in sys.argv[2:] or CASES:
        if any(ends := run(name, Path(sys.argv[1]) / name)):
            sys.exit(f"{name}: its ranks ended with {ends}")


if __name__ == "__main__":
    main()
