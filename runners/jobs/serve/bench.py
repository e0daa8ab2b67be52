"""Measure the speedup of batching many adapters: ``python -m runners.jobs.serve.bench``.

Prints ratios as JSON lines, for `manage.py bench adapters`. Model and adapters are random, so
only whether a ratio is above or below 1 is meaningful.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from runners.host.bench import Ratio
from runners.jobs.adapters import Adapter, LoraPair, MixedAdapters
from runners.jobs.loading import demo_config, fresh_model, quantised_matrices, ready
from runners.jobs.ratios import ratio_of, seconds_in_alternating_rounds
from runners.jobs.runtime import prepare_process
from runners.jobs.serve.paging import (
    CHECK_TOKENS,
    PagedCache,
    TokenRow,
    check_paging,
    forward,
    pages_for,
)
from runners.jobspec import DemoModel

SHAPE = DemoModel(hidden_size=256, intermediate_size=704)
RANK = 8
Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Effort:
    """The workload that each ratio is measured on."""

    rounds: int = 5
    num_adapters: int = 16
    prompt_tokens: int = 32
    output_tokens: int = 16


def ratios(effort: Effort = Effort(), shape: DemoModel = SHAPE) -> Iterator[Ratio]:
    """Yield every ratio."""
    torch.manual_seed(17)
    config = demo_config(shape)
    model = ready(fresh_model(config, torch.float32))
    adapters = MixedAdapters(
        model, [_adapter(model, str(at)) for at in range(effort.num_adapters)]
    )
    prompts = torch.randint(shape.vocab_size, (effort.num_adapters, effort.prompt_tokens))
    peft, names = _by_peft(ready(fresh_model(config, torch.float32)), effort.num_adapters)
    in_turn, mixed = seconds_in_alternating_rounds(
        (lambda: _peft_pass(peft, prompts, names), lambda: _own_pass(model, adapters, prompts)),
        effort.rounds,
    )
    yield ratio_of("adapters in turn within a batch / side by side", in_turn, mixed)
    tokens = max(effort.prompt_tokens + effort.output_tokens, CHECK_TOKENS)
    cache = PagedCache(effort.num_adapters * pages_for(tokens))
    check_paging(model, cache, shape.vocab_size)
    engine = PagedDecoder(model, cache, adapters, effort.output_tokens)
    one_by_one, together = seconds_in_alternating_rounds(
        (
            lambda: [engine.write(prompts[[at]].tolist(), [at]) for at in range(len(prompts))],
            lambda: engine.write(prompts.tolist(), range(len(prompts))),
        ),
        effort.rounds,
    )
    yield ratio_of("adapters one by one / in one batch", one_by_one, together)


@dataclass(frozen=True)
class PagedDecoder:
    """Greedy decoding over a paged KV cache, each prompt with its own adapter."""

    model: PreTrainedModel
    cache: PagedCache
    adapters: MixedAdapters
    output_tokens: int

    def write(self, prompts: Prompts, owners: Sequence[int]) -> list[list[int]]:
        """Return the answers of prompts that are decoded as one batch."""
        longest = max(map(len, prompts)) + self.output_tokens
        pages = [self.cache.allocate(pages_for(longest)) or [] for _ in prompts]
        new, starts = [list(each) for each in prompts], [0] * len(prompts)
        written: list[list[int]] = [[] for _ in prompts]
        for _ in range(self.output_tokens):
            rows = [TokenRow(*each) for each in zip(new, starts, pages, strict=True)]
            adapter_ids = [at for at, row in zip(owners, rows, strict=True) for _ in row.tokens]
            with self.adapters.serving(torch.tensor([adapter_ids])):
                tokens = forward(self.model, self.cache, rows).argmax(dim=-1).tolist()
            starts = [row.length for row in rows]
            new = [[token] for token in tokens]
            for answer, token in zip(written, tokens, strict=True):
                answer.append(token)
        for each in pages:
            self.cache.free(each)
        return written


def _adapter(model: PreTrainedModel, name: str) -> Adapter:
    pairs = {
        module: LoraPair(torch.randn(RANK, weight.shape[1]), 0.01 * torch.randn(len(weight), RANK))
        for module, weight in quantised_matrices(model).items()
    }
    return Adapter(name, pairs)


def _by_peft(model: PreTrainedModel, count: int) -> tuple[PeftModel, list[str]]:
    config = LoraConfig(r=RANK, target_modules="all-linear", init_lora_weights=False)
    tuned = get_peft_model(model, config, adapter_name="0")
    for at in range(1, count):
        tuned.add_adapter(str(at), config)
    tuned.eval()
    return tuned, [str(at) for at in range(count)]


@torch.inference_mode()
def _peft_pass(model: PeftModel, prompts: torch.Tensor, names: Sequence[str]) -> None:
    model(input_ids=prompts, use_cache=False, adapter_names=list(names))


@torch.inference_mode()
def _own_pass(model: PreTrainedModel, adapters: MixedAdapters, prompts: torch.Tensor) -> None:
    with adapters.serving(torch.arange(len(prompts))[:, None]):
        model(input_ids=prompts, use_cache=False)


if __name__ == "__main__":
    prepare_process()
    for each in ratios():
        sys.stdout.write(json.dumps(each) + "\n")
