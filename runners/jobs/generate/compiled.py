"""A compiled decode step with a static cache.

Prefill is not compiled, because each length would be compiled again. Incomplete batches are filled
with copies of the first prompt, whose answers are dropped. On a GPU the step is one CUDA graph:
positions are tensors, and cache and chosen tokens stay on the device.

Source: Wang et al. 2021 (LightSeq), arXiv:2010.13887; Li et al. 2021 (EET), arXiv:2104.12470.
"""

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions untyped.

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException
from transformers import PreTrainedModel, StaticCache

from runners.jobs.generate.caches import cache_size
from runners.jobs.generate.static import (
    BatchRun,
    Ids,
    Limits,
    Padded,
    check_packable,
    now,
    write_out,
)
from runners.jobs.weights import first_line

Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class CompiledStep:
    """Batches of at most ``rows`` prompts and ``length`` tokens with one compiled step.

    Raises:
        BadInputError: a layer's cache is not a plain KV cache.
    """

    def __init__(self, model: PreTrainedModel, rows: int, length: int) -> None:
        check_packable(model)
        self.model, self.rows, self.length = model, rows, length
        self.cache = StaticCache(config=model.config, max_cache_len=length)
        self.plain_reason = ""  # why the step is not compiled after all
        self._has_graph = next(model.parameters()).device.type == "cuda"
        self._compiled: Step = torch.compile(
            self.forward,
            fullgraph=True,
            dynamic=False,
            mode="reduce-overhead" if self._has_graph else None,
        )

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Run tokens [rows, new] through the model and return the next one of each row."""
        output: Any = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        tokens: torch.Tensor = output.logits[:, -1].argmax(dim=-1)
        return tokens

    @torch.inference_mode()
    def run_batch(self, prompts: Sequence[Ids], limits: Limits) -> BatchRun:
        """Answer the prompts as one padded batch.

        Raises:
            StopRequestedError: the job is to stop; nothing of this batch is kept.
        """
        device = next(self.model.parameters()).device
        filled = [*prompts, *[prompts[0]] * (self.rows - len(prompts))]
        padded = Padded.of(filled, device)
        self._reset_cache()
        began = now(device)
        is_text, at = self._text_places(filled, device), padded.ids.shape[1]
        tokens = self.forward(padded.ids, self._mask(is_text, 0, at), padded.positions)
        prefilled = now(device)
        places = count(at)

        def step(last: torch.Tensor) -> torch.Tensor:
            padded.advance()
            mask = self._mask(is_text, next(places), 1)
            return self._step(last, mask, padded.positions)

        answers, steps = write_out(tokens, len(prompts), limits, step)
        ended = now(device)
        size = cache_size(self.cache)
        return BatchRun(answers, prefilled - began, ended - prefilled, steps, size)

    def _step(
        self, last: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Run the compiled step; if it does not compile, the plain one from now on."""
        if self._has_graph:
            torch.compiler.cudagraph_mark_step_begin()
        try:
            tokens = self._compiled(last, mask, positions)
        except TorchDynamoException as error:  # before the step has changed the cache
            self.plain_reason = first_line(getattr(error, "inner_exception", error))
            self._compiled, self._has_graph = self.forward, False
            return self.forward(last, mask, positions)
        # A graph writes each step's tokens to one place.
        return tokens.clone() if self._has_graph else tokens

    def _reset_cache(self) -> None:
        layers: list[Any] = list(self.cache.layers)  # all of them StaticLayer, as checked
        for layer in layers:
            if layer.is_initialized:
                layer.reset()

    def _text_places(self, prompts: Sequence[Ids], device: torch.device) -> torch.Tensor:
        """Return which cache positions [rows, length] will hold text."""
        longest = max(map(len, prompts))
        begins = torch.tensor([[longest - len(each)] for each in prompts], device=device)
        return torch.arange(self.length, device=device)[None] >= begins

    def _mask(self, is_text: torch.Tensor, begin: int, count: int) -> torch.Tensor:
        """Return the mask of ``count`` new tokens [rows, 1, count, length]: causal, no padding.

        Padding attends to itself, because a softmax over nothing is NaN.
        """
        places = torch.arange(self.length, device=is_text.device)
        new_places = places[begin : begin + count, None]
        causal = (places[None] <= new_places)[None, None] & is_text[:, None, None]
        return causal | (places[None] == new_places)[None, None]
