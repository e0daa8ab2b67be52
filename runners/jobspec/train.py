"""Spec of a training job."""

from collections.abc import Iterator, Mapping
from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from runners.adapter_options import LoraOptions, QuantizedTraining
from runners.jobspec.base import (
    ArtefactModel,
    ComputeDtype,
    DataParallel,
    DemoModel,
    FolderModel,
    ModelRef,
)
from runners.jobspec.data import HostText, MixedData, SampleOptions, TrainData
from runners.jobspec.text_samples import TextSamples
from runners.jobspec.training_memory import LengthSchedule, TrainingMemory, check_lengths
from runners.layout_options import LayoutOptions

CheckpointWriting = Literal["auto", "background", "in_step"]
TrainAttention = Literal["auto", "flash", "eager", "flex"]  # auto: depends on the device


class TrainSpec(TrainingMemory):
    """Train or fine-tune a model on the host's own text or on ``data``.

    A step has ``gradient_accumulation_steps`` micro-batches, divided among the ranks: the step is
    the same for any number of ranks. With ``lora`` the weights are frozen and an adapter is
    trained. With ``quantized`` the resulting weights lie on an integer grid.
    ``length_schedule`` trains shares of the steps at shorter lengths first, in more rows.
    ``attention``: fused, eager, or flex (block-sparse over packed rows, GPUs only); ``compiled``:
    layers run as compiled kernels.
    With ``compute_dtype`` fp8 the layers' matrix products round their operands; the rest is bf16.
    ``layout``: the parallel layout; without one each rank holds a whole copy. A pipeline that may
    shrink redistributes its layers over the remaining ranks. ``checkpoint_writing``:
    in the background from a copy in host memory, or within the step; ``auto`` is background for
    states on a GPU, since on a CPU the copy would need memory that is not planned for it.
    The newest ``keep_checkpoints`` are kept; ``early_stop_validations`` in a row without a better
    loss end the training. With ``keep_best`` the result has the weights with the lowest held-out
    loss, if it was measured during training. ``text_samples`` generates samples periodically.
    The objective ``classification`` trains an encoder on labelled texts, one per row; the host's
    own are code passages labelled with their package.
    """

    kind: Literal["train"] = "train"
    model: ModelRef = DemoModel()
    objective: Literal["next_token", "classification"] = "next_token"
    sequence_length: PositiveInt = 256
    length_schedule: LengthSchedule | None = Field(default=None, max_length=16)
    micro_batch_size: PositiveInt = 2  # in a short run many small steps beat few large ones
    gradient_accumulation_steps: PositiveInt = 1
    learning_rate: PositiveFloat = 3e-3
    max_steps: PositiveInt | None = None
    time_budget_seconds: PositiveFloat | None = 120.0
    compute_dtype: ComputeDtype = "bf16"
    attention: TrainAttention = "auto"
    compiled: bool = False
    lora: LoraOptions | None = None
    quantized: QuantizedTraining | None = None
    data: TrainData = HostText()
    samples: SampleOptions = (
        SampleOptions()
    )  # for files only: the host's own text is cut into windows
    seed: int = 17
    checkpoint_every_seconds: PositiveFloat = 30.0
    checkpoint_writing: CheckpointWriting = "auto"
    keep_checkpoints: int = Field(default=1, ge=1, le=100)
    early_stop_validations: PositiveInt | None = None
    keep_best: bool = True
    text_samples: TextSamples | None = None
    parallel: DataParallel = DataParallel()
    layout: LayoutOptions | None = None

    def writes_checkpoints_in_background(self, device_type: str) -> bool:
        """Return whether checkpoints are written in the background on ``cuda`` or ``cpu``.

        States offloaded to disk have no memory for the copy.
        """
        on_gpu = "background" if device_type == "cuda" else "in_step"
        chosen = on_gpu if self.checkpoint_writing == "auto" else self.checkpoint_writing
        return chosen == "background" and self.optimizer_offload != "disk"

    @model_validator(mode="after")
    def _ends_some_time(self) -> Self:
        if self.max_steps is None and self.time_budget_seconds is None:
            msg = "training needs an end: give max_steps or time_budget_seconds, or both"
            raise ValueError(msg)
        self.check_fused(self.gradient_accumulation_steps, self.compute_dtype)
        self._check_integers()
        if self.length_schedule:
            if not isinstance(self.data, HostText):
                raise ValueError(
                    "length_schedule cuts the host's own text anew at each length, and files "
                    "have rows of their own; choose data host, or no schedule"
                )
            tokens = self.micro_batch_size * self.sequence_length
            check_lengths(self.length_schedule, self.sequence_length, tokens, self.max_steps)
        if self.lora is not None and not isinstance(self.model, FolderModel | ArtefactModel):
            msg = (
                f"lora adapts trained weights, and a '{self.model.source}' model has none; name "
                "a folder, or the model of an earlier job"
            )
            raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _classifies(self) -> Self:
        if self.objective == "classification":
            for why in _against_classification(self):
                raise ValueError(f"objective is classification, {why}")
        return self

    @model_validator(mode="after")
    def _can_be_compiled(self) -> Self:
        layout = self.layout
        hindrances = {
            f"activation_offload {self.activation_offload}": self.activation_offload != "none",
            "activation_recomputation selective": self.activation_recomputation == "selective",
            "optimizer qft": self.optimizer == "qft",
            "quantized": self.quantized is not None,
            "length_schedule": self.length_schedule is not None,
            "a layout that divides the model": layout is not None and not layout.is_whole_copies,
        }
        if self.compiled:
            _refuse(hindrances, "compiled layers do not go", "leave compiled out, or these")
        return self

    @model_validator(mode="after")
    def _products_can_be_narrow(self) -> Self:
        layout = self.layout
        hindrances = {
            "lora": self.lora is not None,
            "quantized": self.quantized is not None,
            "optimizer qft": self.optimizer == "qft",
            "a layout that divides layers, sequences or experts": layout is not None
            and layout.divides_the_model,
        }
        if self.compute_dtype == "fp8":
            _refuse(hindrances, "compute_dtype fp8 does not go", "choose bf16, or leave these out")
        return self

    @model_validator(mode="after")
    def _attends_by_blocks(self) -> Self:
        layout = self.layout
        hindrances = {
            "a layout that divides layers, sequences or experts": layout is not None
            and layout.divides_the_model,
            "compiled": self.compiled,
            "activation_recomputation selective": self.activation_recomputation == "selective",
            "objective classification": self.objective == "classification",
        }
        if self.attention == "flex":
            _refuse(hindrances, "attention flex does not go", "choose flash, or leave these out")
        return self

    @property
    def published_dtype(self) -> Literal["fp32", "bf16", "fp16"]:
        """Return the dtype of the saved weights: fp8 training saves bf16."""
        return "bf16" if self.compute_dtype == "fp8" else self.compute_dtype

    @model_validator(mode="after")
    def _is_laid_out(self) -> Self:
        layout = self.layout
        if layout is None:
            return self
        if self.parallel.on_lost_rank == "shrink" and not layout.is_pipeline_alone:
            msg = (
                "on_lost_rank is shrink, and this layout is for a fixed number of ranks; choose "
                "stop, a pipeline of one stage a rank, or leave the layout out"
            )
            raise ValueError(msg)
        self._check_offload(layout)
        if self.activation_offload != "none" and not layout.is_whole_copies:
            msg = (
                f"activation_offload is {self.activation_offload}, which goes with whole copies "
                "of the model; leave it or the other parallel sizes out"
            )
            raise ValueError(msg)
        if self.lora is not None and not layout.is_whole_copies:
            msg = "lora trains on whole copies of the model; leave the other parallel sizes out"
            raise ValueError(msg)
        if self.gradient_accumulation_steps % layout.data_parallel_size:
            msg = (
                f"gradient_accumulation_steps is {self.gradient_accumulation_steps}, which "
                f"data_parallel_size {layout.data_parallel_size} does not divide; take a multiple"
            )
            raise ValueError(msg)
        return self

    def _check_offload(self, layout: LayoutOptions) -> None:
        if layout.is_whole_copies:
            return
        constraints = {
            "optimizer": (self.optimizer, "adamw"),
            "optimizer_offload": (self.optimizer_offload, "none"),
            "quantized": (self.quantized and self.quantized.method, None),
        }
        for name, (value, usual) in constraints.items():
            if value != usual:
                raise ValueError(
                    f"{name} is {value}, which goes with whole copies of the model; leave it or "
                    "the other parallel sizes out"
                )

    def _check_integers(self) -> None:
        if self.optimizer == "qft" and (self.lora or self.quantized):
            other = "lora" if self.lora else "quantized"
            raise ValueError(
                f"optimizer qft trains every weight as an 8-bit integer, and {other} has layers "
                "of its own; choose one of them"
            )
        if self.quantized is None:
            return
        method = self.quantized.method
        if self.lora is not None:
            raise ValueError(
                f"quantized.method {method} changes the layers that lora would adapt; choose one "
                "of them, or lora with base_dtype nf4"
            )
        if method == "alphatuning" and not isinstance(self.model, FolderModel | ArtefactModel):
            raise ValueError(
                f"quantized.method alphatuning trains the scales of trained weights, and a "
                f"'{self.model.source}' model has none; name a folder, or an earlier job's model"
            )


def _refuse(hindrances: Mapping[str, bool], sentence: str, way_out: str) -> None:
    """Raise ValueError if any of the hindrances applies."""
    if present := [what for what, is_there in hindrances.items() if is_there]:
        raise ValueError(f"{sentence} with {', '.join(present)}; {way_out}")


def _against_classification(spec: TrainSpec) -> Iterator[str]:
    """Yield the options that are incompatible with classification."""
    if isinstance(spec.model, DemoModel):
        yield "and the demo model predicts text; name an encoder's folder, or its config"
    for name in ("lora", "quantized", "length_schedule", "text_samples"):
        if getattr(spec, name) is not None:
            yield f"and {name} is for models that predict text; leave it out"
    if isinstance(spec.data, MixedData):
        yield "and its classes come from one file; leave the other sources out"
    layout = spec.layout
    if layout and layout.world_size > layout.data_parallel_size:
        yield (
            f"whose ranks hold copies or ZeRO's shards, and the layout divides {layout.world_size}"
            f" ranks into {layout.data_parallel_size} copies; leave the other parallel sizes at 1"
        )
