"""Decode steps of Slipway's own serving engine: their tokens, and their speed next to eager ones.

On a GPU padded steps are CUDA graphs; a CPU computes the same without one.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from runners.jobs.bench.device_rates import wait_for
from runners.jobs.loading import use_attn_implementation
from runners.jobs.prove.recorder import Recorder
from runners.jobs.serve.contract import Choice, Limits, Sampling
from runners.jobs.serve.padded_decode import PaddedDecode, Sampler, choose
from runners.jobs.serve.paging import PAGED, PagedCache, TokenRow, forward, pages_for
from runners.supervision.child import compiler_name

REPETITIONS = 3
GREEDY = Sampling(1, temperature=0.0)
Step = Callable[[Sequence[TokenRow]], list[Choice]]


class Sequences(NamedTuple):
    """Sequences whose prompts are in the cache, and the first token after each."""

    lengths: list[int]
    pages: list[list[int]]
    first: list[int]

    def decoded(self, step: Step, count: int) -> list[list[int]]:
        """Return the first token of each sequence and ``count`` more."""
        answers = [[token] for token in self.first]
        for at in range(count):
            rows = [
                TokenRow(answer[-1:], length + at, pages)
                for answer, length, pages in zip(answers, self.lengths, self.pages, strict=True)
            ]
            for answer, choice in zip(answers, step(rows), strict=True):
                answer.append(choice.token)
        return answers


class Decoder:
    """The eager and the padded step of one model for sequences of one length at most."""

    def __init__(self, model: PreTrainedModel, prompts: Sequence[list[int]], count: int) -> None:
        """Run the prompts; ``count`` tokens can be decoded after each."""
        self.model = model
        longest = max(map(len, prompts)) + count + 1
        self._samplers = [Sampler(GREEDY) for _ in prompts]
        self._cache = PagedCache(len(prompts) * pages_for(longest))
        self._limits = Limits(len(prompts), 0, longest, frozenset())
        pages = [self._cache.allocate(pages_for(longest)) or [] for _ in prompts]
        rows = [TokenRow(each, 0, own) for each, own in zip(prompts, pages, strict=True)]
        first = [each.token for each in self.eager(rows)]
        self.sequences = Sequences([len(each) for each in prompts], pages, first)

    def eager(self, rows: Sequence[TokenRow]) -> list[Choice]:
        """Return the next token of each row, from kernels that are launched one by one."""
        return choose(forward(self.model, self._cache, rows), self._samplers)

    @contextmanager
    def padded(self) -> Iterator[Step]:
        """Yield the padded step, as an endpoint on this host has it.

        Raises:
            CaptureError: the step cannot be captured.
        """
        has_compiler = shutil.which(compiler_name()) is not None
        fuses = has_compiler and self.model.device.type == "cuda"
        decode = PaddedDecode(self.model, self._cache, self._limits, fuses=fuses)
        try:
            decode.prepare()
            yield lambda rows: decode.step(rows, self._samplers) or []
        finally:
            decode.release()


def check_tokens(recorder: Recorder, model: PreTrainedModel) -> None:
    """Compare the tokens of the padded step with those of the eager one."""
    prompts, count = [[1, 2, 3], [4, 5, 6, 7, 8], [9] * 17], 8
    with use_attn_implementation(model, PAGED):
        decoder = Decoder(model, prompts, count)
        eager = decoder.sequences.decoded(decoder.eager, count)
        with decoder.padded() as step:
            padded = decoder.sequences.decoded(step, count)
    recorder.check(
        "serving decode step",
        is_met=padded == eager,
        expected=f"the tokens of the eager step, {eager}",
        found=str(padded),
        advice="Serve with enforce_eager on this host; report this with the file.",
    )


def decode_speeds(
    recorder: Recorder,
    model: PreTrainedModel,
    batches: Sequence[int],
    prompt_tokens: int,
    output_tokens: int,
) -> None:
    """Measure greedy decode steps at each batch size; sampling and scheduling are in them."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    for batch in batches:
        name = f"serving decode bf16, batch {batch}"
        if not recorder.has_time(name, 15):
            continue
        with recorder.part(name), use_attn_implementation(model, PAGED):
            prompts = torch.randint(0, vocabulary, (batch, prompt_tokens)).tolist()
            decoder = Decoder(model, prompts, output_tokens)
            for way in ("eager", "CUDA graphs"):
                if way == "CUDA graphs" and recorder.device.type != "cuda":
                    continue
                steps = nullcontext(decoder.eager) if way == "eager" else decoder.padded()
                with recorder.part(f"{name}, {way}"), steps as step:
                    seconds = _seconds(recorder, decoder.sequences, step, output_tokens)
                    recorder.figure(
                        f"{name}, {way}",
                        "tokens/s",
                        [batch * output_tokens / each for each in seconds],
                        f"after prompts of {prompt_tokens} tokens, {output_tokens} tokens each",
                    )


def _seconds(recorder: Recorder, sequences: Sequences, step: Step, count: int) -> list[float]:
    times = []
    for _ in range(1 + REPETITIONS):
        wait_for(recorder.device)
        began = time.perf_counter()
        sequences.decoded(step, count)
        wait_for(recorder.device)
        times.append(time.perf_counter() - began)
    return times[1:]
