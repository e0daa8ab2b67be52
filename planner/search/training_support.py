"""Which training layouts run: in Slipway's trainer, or in a tool to which plans are exported.

Sources: DeepSpeed, runtime/pipe/engine.py (its pipeline refuses ZeRO 2 and 3, and takes a
PipelineModule, which quantised or adapted Transformers models are not); PEFT's documentation on
DeepSpeed and FSDP (LoRA and QLoRA run under ZeRO 1, 2 and 3).
"""

from dataclasses import dataclass
from functools import cached_property

from planner.catalog.engines import DEFAULT_ENGINE, Engine, get_engine
from planner.cost.columns import Flag, both, divides, either
from planner.exports.format_support import OWN_METHODS, WHOLE_WEIGHTS
from planner.search.question import Question
from planner.specs.base import JsonObject
from planner.specs.workload import TrainWorkload
from planner.workload.ranks import Layout
from planner.workload.training_exchange import SHARDED_GRADIENTS
from planner.workload.training_methods import ADAPTER_METHODS, optimizer_of

SPLITS = ("tensor", "pipeline", "context", "expert")
MEGATRON_OPTIMIZERS = frozenset({"adamw", "sgd", "lion"})
ON_HOST: JsonObject = {"optimizer": "cpu", "weights_cpu": 1.0}
ON_DISK: JsonObject = {"optimizer": "nvme", "weights_disk": 1.0}
KEPT_AWAY: JsonObject = {"activations_cpu": 1.0}
# Offload choices of training engines: optimiser states and gradients with any pipeline, weights
# (layer by layer) and activations only with a single stage.
STATES_AWAY: tuple[JsonObject, ...] = ({}, {"optimizer": "cpu"}, {"optimizer": "nvme"})
LAYERS_AWAY = (ON_HOST, ON_DISK, KEPT_AWAY, {**ON_HOST, **KEPT_AWAY}, {**ON_DISK, **KEPT_AWAY})


@dataclass(frozen=True)
class TrainingSupport:
    """What runs a training's layouts; a pinned size is the user's own choice and is kept."""

    question: Question
    workload: TrainWorkload

    @cached_property
    def engine(self) -> Engine:
        """Return the engine of the question."""
        kind = self.question.device.kind
        return get_engine(self.question.request.engine, kind, training=True)

    def offloads(self, stages: int, *, last_resort: bool) -> tuple[JsonObject, ...]:
        """Return the offload choices of a pipeline of some stages.

        Slipway's trainer moves AdamW's moments alone, from GPUs, on whole copies of the model, and
        copies them in turn with the update: only as a last resort, where nothing fits otherwise.
        """
        if self.question.request.pins.offload:
            return () if last_resort else ({},)
        if self.engine.role != "runner":
            choices = STATES_AWAY if stages > 1 else (*STATES_AWAY, *LAYERS_AWAY)
            return () if last_resort else choices
        if not last_resort:
            return ({},)
        moves = self._has_trainer and self._on_gpu and optimizer_of(self.workload) == "adamw"
        return STATES_AWAY[1:] if moves and stages == 1 else ()

    def runs(self, layout: Layout, *, offloads: bool) -> Flag:
        """Return which layouts the engine, or an export of the plan, runs."""
        if self.engine.key == "deepspeed":
            return self._in_deepspeed(layout)
        if self.engine.role != "runner":
            return True
        if not self._has_trainer:
            return self._in_exports(layout)
        own = self._in_trainer(layout, offloads=offloads)
        # Who names Slipway's trainer means to launch the plan, not to export it.
        is_named = self.question.request.engine is not None
        return own if is_named or offloads else either(own, self._in_exports(layout))

    @property
    def _has_trainer(self) -> bool:
        return self.engine.key == DEFAULT_ENGINE

    @property
    def _on_gpu(self) -> bool:
        return self.question.device.kind == "gpu"

    @property
    def _trains_weights(self) -> bool:
        return self.workload.method in WHOLE_WEIGHTS

    def _is_one(self, layout: Layout, *axes: str) -> Flag:
        """Return whether layouts have a size of 1 along axes that are not pinned."""
        found: Flag = True
        for axis in axes:
            if f"{axis}_parallel_size" not in self.question.pinned:
                found = both(found, getattr(layout, axis) == 1)
        return found

    def _is_below(self, layout: Layout, stage: int) -> Flag:
        """Return whether layouts have a lower ZeRO stage, or a pinned one."""
        return True if "zero_stage" in self.question.pinned else layout.zero_stage < stage

    def _in_trainer(self, layout: Layout, *, offloads: bool) -> Flag:
        """Return which layouts Slipway's trainer runs (``runners/layout_options.py``).

        Adapters, optimisers other than AdamW and offloaded states need whole copies.
        """
        can_split = self._trains_weights and optimizer_of(self.workload) == "adamw"
        if offloads or not can_split:
            return both(self._is_one(layout, *SPLITS), self._is_below(layout, 1))
        unsharded = self._is_below(layout, 1)
        summed = either(
            self._is_one(layout, "pipeline"),
            either(
                self._is_below(layout, SHARDED_GRADIENTS), layout.zero_stage > SHARDED_GRADIENTS
            ),
        )
        divided = both(unsharded, self._is_one(layout, "tensor"))
        whole_experts = both(divided, divides(layout.expert, layout.data))
        experts = either(self._is_one(layout, "expert"), whole_experts)
        sequence = either(self._is_one(layout, "context"), layout.sequence_parallel == 0)
        return both(both(summed, experts), sequence)

    def _in_exports(self, layout: Layout) -> Flag:
        """Return which layouts an exported configuration runs, as ``format_support`` has it."""
        method, optimizer = self.workload.method, optimizer_of(self.workload)
        if method in OWN_METHODS:
            return False
        if self._on_gpu and self._trains_weights and optimizer in MEGATRON_OPTIMIZERS:
            return True
        plain = self._is_one(layout, *SPLITS)
        if self._on_gpu:
            return either(plain, self._in_deepspeed(layout))
        return both(plain, self._is_below(layout, 1)) if method == "qlora" else plain

    def _in_deepspeed(self, layout: Layout) -> Flag:
        """Return which layouts DeepSpeed runs: adapters under ZeRO alone."""
        if self.workload.method in ADAPTER_METHODS:
            return self._is_one(layout, *SPLITS)
        staged = self._is_one(layout, "pipeline")
        return either(staged, self._is_below(layout, SHARDED_GRADIENTS))
