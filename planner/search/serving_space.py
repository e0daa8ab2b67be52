"""Every way to serve or generate that is worth costing: blocks of strategies, numbers as grids."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import cast

import numpy as np

from planner.catalog.engines import Engine, get_engine
from planner.cost.columns import both, divides, either
from planner.cost.dtypes import element_bytes
from planner.search.block import Block, Flags, Numbers, axes, plainly
from planner.search.question import Question
from planner.search.space import FRUGAL, MAX_TENSOR_RANKS, formats
from planner.search.training_space import MAX_STAGES, divisors
from planner.search.unlike_space import by_layout
from planner.specs.base import Dtype, JsonObject
from planner.specs.strategy import Strategy
from planner.specs.workload import GenerateWorkload, ServeWorkload
from planner.techniques.registry import get
from planner.workload.ranks import Layout
from planner.workload.resolve import resolve
from planner.workload.validity import mask, rank_rules, serving_rules

MAX_CONTEXT_RANKS = 16
MAX_ATTENTION_RANKS = 64
# Shorter pieces of a prompt leave a ring of context-parallel ranks nothing to compute.
MIN_CONTEXT_TOKENS = 16_384
SPARSE = 0.5  # a grid with fewer strategies than this costs more empty cells than it saves
TOKEN_BUDGETS = (1024, 2048, 4096, 8192, 16_384)
SIZES = frozenset(
    {
        "data_parallel_size",
        "tensor_parallel_size",
        "context_parallel_size",
        "expert_parallel_size",
        "attention_data_parallel_size",
        "max_batch_tokens",
        "pipeline_parallel_size",
    }
)


def serving_blocks(
    question: Question, workload: ServeWorkload | GenerateWorkload
) -> tuple[Block, ...]:
    """Return the blocks of every strategy; layouts that leave devices idle only if none else.

    Raises:
        PlannerError: no strategy of this request can be costed, for the reason given.
    """
    space = ServingSpace(question, workload)
    whole = tuple(space.blocks(idle=question.request.objective in FRUGAL))
    blocks = whole or tuple(space.blocks(idle=True))
    if not question.cluster.other_nodes:
        return blocks
    return tuple(part for block in blocks for part in by_layout(block))


@dataclass(frozen=True)
class ServingSpace:
    """What a request leaves open of the ways to serve it, each choice with its values."""

    question: Question
    workload: ServeWorkload | GenerateWorkload

    def blocks(self, *, idle: bool) -> Iterator[Block]:
        """Yield the blocks that hold at least one strategy."""
        for shared in self._shared():
            block = self._block(shared, idle=idle)
            if block.keep.any():
                yield block

    @cached_property
    def _engine(self) -> Engine:
        return get_engine(self.question.request.engine, self.question.device.kind)

    def _shared(self) -> Iterator[JsonObject]:
        """Yield what changes the formulas themselves, one combination after the other."""
        pinned = self.question.pinned
        others = {name: value for name, value in pinned.items() if name not in SIZES}
        apart = self._pipeline_sizes if self._stage_by_stage else (None,)
        for formats_chosen, stages in product(self._formats, apart):
            own = {"pipeline_parallel_size": stages} if stages else {}
            yield {**formats_chosen, **own, **others}

    @cached_property
    def _stage_by_stage(self) -> bool:
        """Return whether something pinned is costed for one number of stages at a time."""
        pins = self.question.request.pins
        return pins.offload is not None or pins.speculative is not None

    @cached_property
    def _formats(self) -> tuple[JsonObject, ...]:
        """Return the formats of weights and activations; a named quantisation brings its own."""
        pinned = self.question.pinned
        if "quantization" in pinned:
            return ({},)
        names = ("weight_dtype", "activation_dtype")
        offered = [dict(zip(names, pair, strict=True)) for pair in formats(self.question)]
        asked = {name: pinned[name] for name in names if name in pinned}
        kept = [one for one in offered if {**one, **asked} == one]
        return tuple(kept) or (asked,)

    @cached_property
    def _pipeline_sizes(self) -> tuple[int, ...]:
        question, pinned = self.question, self.question.pinned.get("pipeline_parallel_size")
        if pinned:
            return (pinned,)
        if get("pipeline_parallel").reason_against(question.case):
            return (1,)
        most = min(question.model.num_hidden_layers, MAX_STAGES)
        return tuple(divisors(question.cluster.num_devices, most))

    def _caches(self, default: Dtype | None) -> tuple[Dtype | None, ...]:
        """Return the formats of the cache: the engine's default, and a narrow one if it runs."""
        pinned = "kv_cache_dtype" in self.question.pinned
        narrow = all("fp8" in one.peak_flops_per_second for one in self.question.devices)
        offered = narrow and self._engine.role == "serving" and default != "fp8"
        return (None, "fp8") if offered and not pinned else (None,)

    @cached_property
    def _budgets(self) -> list[tuple[bool, int]]:
        """Return whether prompts are cut, and into steps of how many tokens; 0 is the default.

        Only long prompts are, by an engine that schedules steps.
        """
        pinned = self.question.pinned
        long = self.workload.input_tokens > TOKEN_BUDGETS[0]
        serving = isinstance(self.workload, ServeWorkload) and self._engine.max_batch_tokens > 0
        both_ways = (False, True) if long and serving else (False,)
        cuts = (pinned["chunked_prefill"],) if "chunked_prefill" in pinned else both_ways
        longest = max(self.workload.input_tokens, TOKEN_BUDGETS[1])
        offered = [size for size in TOKEN_BUDGETS if size <= 2 * longest]
        asked = [pinned["max_batch_tokens"]] if "max_batch_tokens" in pinned else None
        return [(cut, size) for cut in cuts for size in asked or (offered if cut else [0])]

    def _block(self, shared: JsonObject, *, idle: bool) -> Block:
        question = self.question
        one = Strategy.model_validate({**shared, "data_parallel_size": 1})
        setting = resolve(question.estimate_request(one))
        caches = self._caches(setting.strategy.kv_cache_dtype)
        sizes = self._sizes(shared.get("pipeline_parallel_size"), len(caches))
        layout = self._layout(shared.get("pipeline_parallel_size"), sizes, setting.layout)
        if len(caches) > 1:
            each = [
                element_bytes(one or setting.strategy.kv_cache_dtype or "bf16") for one in caches
            ]
            kept = np.array(each)[sizes["kv_cache_dtype"].astype(np.int64)]
            layout = replace(layout, cache_element_bytes=cast("float", kept))
        shape = np.broadcast_shapes(*(values.shape for values in sizes.values()))
        available = question.cluster.num_devices
        keep = both(
            both(mask(rank_rules(question.model, available, layout)), self._worthwhile(layout)),
            mask(serving_rules(question.model, layout)) if question.model.is_moe else True,
        )
        if not idle:
            keep = both(keep, layout.devices == available)
        block = Block(
            question=question,
            shared=shared,
            sizes=sizes,
            setting=replace(setting, layout=layout),
            keep=cast("Flags", np.broadcast_to(keep, shape)),
            caches=caches,
        )
        return block.compact if block.keep.mean() < SPARSE else block

    def _worthwhile(self, layout: Layout) -> Flags:
        """Return which layouts are whole ones, and no other layout by another name."""
        whole = both(divides(1, layout.data), layout.data >= 1)
        apart = either(layout.attention_data == 1, layout.expert > 1)
        return cast("Flags", both(whole, apart))

    def _sizes(self, stages: int | None, caches: int) -> dict[str, Numbers]:
        """Return the numbers of each open choice, each along its own dimension."""
        model = self.question.model
        choices: dict[str, Sequence[int]] = {
            "used": self._device_counts,
            "tensor_parallel_size": self._tensor_sizes,
            "context_parallel_size": self._context_sizes,
            "max_batch_tokens": [size for _, size in self._budgets],
        }
        if caches > 1:
            choices["kv_cache_dtype"] = range(caches)
        if stages is None:
            choices["pipeline_parallel_size"] = self._pipeline_sizes
        if model.is_moe:
            most = min(self.question.cluster.num_devices, MAX_ATTENTION_RANKS)
            choices["expert_parallel_size"] = divisors(model.num_experts, most)
            choices["attention_data_parallel_size"] = divisors(most, most)
        pinned = self.question.pinned
        fixed = pinned.keys() - {"max_batch_tokens"}
        sizes = axes(
            {
                name: np.array([pinned[name]] if name in fixed else values, dtype=np.float64)
                for name, values in choices.items()
            }
        )
        cuts = np.array([cut for cut, _ in self._budgets], dtype=np.float64)
        sizes["chunked_prefill"] = cuts.reshape(sizes["max_batch_tokens"].shape)
        return sizes

    def _layout(self, stages: int | None, sizes: dict[str, Numbers], one: Layout) -> Layout:
        """Return the layout of a grid; data parallelism takes the devices that are left."""
        tensor, context = sizes["tensor_parallel_size"], sizes["context_parallel_size"]
        attention = sizes.get("attention_data_parallel_size", np.ones(1))
        used, budgets = sizes.pop("used"), sizes["max_batch_tokens"]
        pipeline = stages or sizes["pipeline_parallel_size"]
        data = self.question.pinned.get("data_parallel_size") or used / (
            tensor * context * attention * pipeline
        )
        sizes["data_parallel_size"] = np.asarray(data, dtype=np.float64)
        columns: JsonObject = {
            "data": data,
            "tensor": tensor,
            "pipeline": pipeline,
            "expert": sizes.get("expert_parallel_size", 1),
            "context": context,
            "attention_data": attention if self.question.model.is_moe else 1,
            "batch_tokens": np.where(budgets > 0, budgets, one.batch_tokens),
            "chunked": sizes["chunked_prefill"] > 0,
        }
        return Layout(**plainly(columns))

    @cached_property
    def _device_counts(self) -> list[int]:
        """Return how many devices a strategy may take: all of them, or fewer to save."""
        available = self.question.cluster.num_devices
        if "data_parallel_size" in self.question.pinned:
            return [available]
        if self.question.request.objective not in FRUGAL:
            return [available]
        powers = [2**power for power in range(available.bit_length()) if 2**power <= available]
        return sorted({*powers, available})

    @cached_property
    def _tensor_sizes(self) -> list[int]:
        question = self.question
        if get("tensor_parallel").reason_against(question.case):
            return [1]
        most = min(question.cluster.widest_node, MAX_TENSOR_RANKS)
        return divisors(question.model.num_attention_heads, most)

    @cached_property
    def _context_sizes(self) -> list[int]:
        most = min(self.workload.input_tokens // MIN_CONTEXT_TOKENS, MAX_CONTEXT_RANKS)
        return divisors(self.question.cluster.num_devices, most) or [1]
