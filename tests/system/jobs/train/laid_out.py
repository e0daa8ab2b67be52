"""The same small training in every layout, each on as many real gloo ranks as it takes.

One process imports the libraries and forks the ranks; those of one number of ranks run all of
its layouts, one after another, and leave what they saw as JSON.
"""

import json
import math
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from runners.jobs.events import Emitter
from runners.jobs.loading import fresh_model
from runners.jobs.memory import optimizer_bytes
from runners.jobs.ranks import ALONE, Ranks
from runners.jobs.runtime import Job
from runners.jobs.train.communication import CollectiveProfiler
from runners.jobs.train.evaluator import HeldOutData
from runners.jobs.train.optimizers import build_optimizer
from runners.jobs.train.rows import TextBatches
from runners.jobs.train.sources import LabelledBatches, LabelledRows, Samples
from runners.jobs.train.trainer import Trainer
from runners.jobspec import RandomModel, TrainSpec
from runners.jobspec.train import LayoutOptions
from runners.shared.messages import RunRequest
from tests.system.jobs.train.forked import forked

STEPS = 4
BROKEN_OFF = (1, 2)  # after how many steps the chain below goes on with other ranks
LLAMA: dict[str, object] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 128,
    "max_position_embeddings": 16, "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL: dict[str, object] = {
    **LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
    "num_hidden_layers": 2, "intermediate_size": 32,
}  # fmt: skip
DISTILBERT: dict[str, object] = {
    "model_type": "distilbert", "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4,
    "vocab_size": 128, "max_position_embeddings": 16, "num_labels": 4, "dropout": 0.0,
    "attention_dropout": 0.0, "seq_classif_dropout": 0.0, "initializer_range": 0.2,
}  # fmt: skip
MODELS = {"llama": LLAMA, "mixtral": MIXTRAL}
ZERO = {f"ZeRO-{stage}": {"data_parallel_size": 2, "zero_stage": stage} for stage in (1, 2, 3)}
TP = {"tensor_parallel_size": 2}
PP = {"pipeline_parallel_size": 2}
DP = {"data_parallel_size": 2}
EP = {"data_parallel_size": 2, "expert_parallel_size": 2}
WOVEN = {**PP, "virtual_pipeline_size": 2}
# One way of sharing each, on two ranks.
SHARED: dict[str, dict[str, Any]] = {
    "data parallel": DP,
    "ZeRO-3": ZERO["ZeRO-3"],
    "tensor": TP,
    "pipeline": PP,
    "experts": EP,
}
CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "data parallel": DP,
        **ZERO,
        "tensor": TP,
        "tensor and sequence": {**TP, "sequence_parallel": True},
        "pipeline, GPipe": {**PP, "pipeline_schedule": "gpipe"},
        "pipeline, 1F1B": PP,
        "pipeline, stages of 3 and 1 layers": {**PP, "pipeline_layers": (3, 1)},
        "pipeline, interleaved": {**WOVEN, "pipeline_schedule": "interleaved"},
        "pipeline, zero bubble": {**WOVEN, "pipeline_schedule": "zero_bubble"},
        "context, gathered": {"context_parallel_size": 2},
        "context, ring": {"context_parallel_size": 2, "context_method": "ring"},
        "experts": EP,
    },
    4: {
        "ZeRO-1 on 4": {"data_parallel_size": 4, "zero_stage": 1},
        "ZeRO-2 on 4": {"data_parallel_size": 4, "zero_stage": 2},
        "ZeRO-3 on 4": {"data_parallel_size": 4, "zero_stage": 3},
        "ZeRO-1, 2 groups": {"data_parallel_size": 4, "zero_stage": 1, "zero_shard_size": 2},
        "ZeRO-2, 2 groups": {"data_parallel_size": 4, "zero_stage": 2, "zero_shard_size": 2},
        "ZeRO-3, 2 groups (HSDP)": {
            "data_parallel_size": 4, "zero_stage": 3, "zero_shard_size": 2,
        },
        "ZeRO-1 and tensor": {**ZERO["ZeRO-1"], **TP},
        "ZeRO-2 and tensor": {**ZERO["ZeRO-2"], **TP},
        "ZeRO-3 and tensor": {**ZERO["ZeRO-3"], **TP},
        "data and tensor and sequence": {**DP, **TP, "sequence_parallel": True},
        "data and pipeline": {**DP, **PP},
        "ZeRO-1 and pipeline": {**ZERO["ZeRO-1"], **PP},
        "tensor and pipeline": {**TP, **PP},
        "ZeRO-3 and context": {**ZERO["ZeRO-3"], "context_parallel_size": 2},
        "context and pipeline": {**PP, "context_parallel_size": 2},
        "context ring on 4": {"context_parallel_size": 4, "context_method": "ring"},
        "experts and data": {**EP, "data_parallel_size": 4},
    },
    8: {
        "data, tensor and pipeline": {**DP, **TP, **PP},
        "ZeRO-1, tensor, sequence and interleaved": {
            **ZERO["ZeRO-1"], **TP, **WOVEN, "sequence_parallel": True,
            "pipeline_schedule": "interleaved",
        },
    },
}  # fmt: skip

# An encoder with a head for classes, which is trained as copies and as shards of them.
ENCODER: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "encoder, data parallel": DP,
        **{f"encoder, {name}": options for name, options in ZERO.items()},
    },
}

# What two copies exchange less of; these come near to one process and do not equal it.
LESS: dict[str, dict[str, Any]] = {
    **{
        method: {**DP, "gradient_compression": method}
        for method in ("fp16", "bf16", "int8", "powersgd")
    },
    "local": {**DP, "synchronization_interval_steps": 2},
}
# In fp16, from a scale that the first steps find too high: all ranks skip the same ones.
SCALED: dict[str, dict[str, Any]] = {
    f"scaled, {name}": options
    for name, options in {"data parallel": DP, **ZERO, "tensor": TP, "pipeline, 1F1B": PP}.items()
}
# With products in 8-bit floats.
NARROW: dict[str, dict[str, Any]] = {
    f"narrow, {name}": options for name, options in {"data parallel": DP, **ZERO}.items()
}
APART = {"encoder": ENCODER, "narrow": {2: NARROW}}  # run alone, when asked for by this name
HIGH_SCALE = 2.0**20
MICRO_BATCHES, FEWER = 4, 2  # of a step; fewer where DTensor takes 60 ms of a core for each
AVERAGED = {"scaled, data parallel", "scaled, ZeRO-3"}  # each rank's gradients count twice before
# One training that goes on from its checkpoint on 2 ranks, and then on 4.
CHAIN: dict[int, dict[str, Any]] = {
    1: {},
    2: {**PP, "pipeline_schedule": "gpipe"},
    4: {**ZERO["ZeRO-3"], **TP},
}


def model_of(name: str) -> str:
    """Return on which model a case runs."""
    if "encoder" in name:
        return "distilbert"
    return "mixtral" if "expert" in name else "llama"


def micro_batches_of(name: str, options: dict[str, Any]) -> int:
    """Return how many micro-batches a case's step has: one for each copy and stage at least."""
    copies, stages = (options.get(f"{axis}_parallel_size", 1) for axis in ("data", "pipeline"))
    is_dear = "tensor_parallel_size" in options or name in SCALED
    return FEWER if is_dear and copies * stages <= FEWER else MICRO_BATCHES


def spec_of(options: dict[str, Any] | None, **changes: Any) -> TrainSpec:
    """Return the training that every layout does."""
    fields: dict[str, Any] = {
        "model": RandomModel(config={}), "sequence_length": 16, "micro_batch_size": 2,
        "gradient_accumulation_steps": MICRO_BATCHES, "max_steps": STEPS, "time_budget_seconds": None,
        "compute_dtype": "fp32", "learning_rate": 1e-2, "checkpoint_every_seconds": 3600.0,
        "layout": LayoutOptions(**options) if options else None,
    }  # fmt: skip
    return TrainSpec(**{**fields, **changes})


class Seen(Trainer):
    """A trainer that keeps what it would say."""

    stop_at: int = 0

    def __post_init__(self) -> None:
        self.values: list[dict[str, float]] = []
        self.held: dict[str, int] = {}
        super().__post_init__()
        self.evaluator.next_validation = math.inf  # it is made once, at the end

    def report_held_bytes(self, **held: int) -> None:
        self.held |= held

    def _emit(self, values: Any) -> None:
        self.values.append({name: float(value) for name, value in values.items()})
        if self.state.step == self.stop_at:
            self.job.stop_requested.set()


def trainer_of(
    model: str, options: dict[str, Any] | None, ranks: Ranks, folder: Path, **changes: Any
) -> Seen:
    """Return a trainer in a layout."""
    if model == "distilbert":
        changes = {"objective": "classification", **changes}
    spec = spec_of(options, **changes)
    torch.manual_seed(spec.seed)
    whole = built(model)
    whole.set_attn_implementation("eager")
    torch.nn.Module.eval(whole)  # as the job loads it
    ids = np.tile(np.arange(24, dtype=np.int32) * 5, 150)
    folder.mkdir(parents=True, exist_ok=True)
    request = RunRequest(attempt_id="a1", job_id="j1", number=1, fence="f", spec=spec)
    emitter = Emitter(os.open(os.devnull, os.O_WRONLY))
    job = Job(folder, folder, request, emitter, threading.Event())
    batches = labelled(spec) if model == "distilbert" else TextBatches(ids, spec)
    return Seen(job, spec, whole, batches, HeldOutData(ids), torch.device("cpu"), ranks)


def built(model: str) -> PreTrainedModel:
    """Return a fresh model, with a head for four classes where it is an encoder."""
    if model != "distilbert":
        return fresh_model(MODELS[model], torch.float32)
    config = AutoConfig.for_model(**DISTILBERT)
    found: PreTrainedModel = AutoModelForSequenceClassification.from_config(config)
    return found


def labelled(spec: TrainSpec) -> LabelledBatches:
    """Return texts of 3 to 15 numbers of which all but the first two say the class."""
    drawn = np.random.default_rng(5)
    lengths = drawn.integers(3, 16, size=64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    labels = drawn.integers(0, 4, size=64)
    ids = np.repeat(labels + 1, lengths)
    ids[offsets[:-1]], ids[offsets[:-1] + 1] = 7, drawn.integers(8, 128, size=64)
    return LabelledBatches(LabelledRows(Samples(ids, offsets, labels)), spec, 0)


def run_case(
    model: str,
    options: dict[str, Any] | None,
    ranks: Ranks,
    folder: Path,
    stop_at: int = 0,
    scale: float = HIGH_SCALE,
    *,
    narrow: bool = False,
    micro_batches: int = MICRO_BATCHES,
) -> dict[str, Any]:
    """Train in a layout and return what this rank saw, on the lead with the whole outcome."""
    began = time.monotonic()
    changes: dict[str, Any] = {"gradient_accumulation_steps": micro_batches}
    if folder.name.startswith("scaled"):
        changes |= {"compute_dtype": "fp16", "max_steps": 2 * STEPS}
    if narrow or folder.name in NARROW:
        changes |= {"compute_dtype": "fp8"}
    trainer = trainer_of(model, options, ranks, folder, **changes)
    trainer.stop_at = stop_at
    trainer.watch = CollectiveProfiler(ALONE)  # a look takes longer than the steps
    if trainer.scale is not None:
        trainer.scale.value = scale
    weights = trainer.layout.weight_bytes()
    trainer.resume()
    trainer.run()
    whole = trainer.layout.gathered_model()
    found: dict[str, Any] = {
        "losses": [each["loss"] for each in trainer.values],
        "norms": [each["grad_norm"] for each in trainer.values],
        "weights": weights,
        "gradients": trainer.held["gradients"],
        "optimizer_states": optimizer_bytes(trainer.optimizer),
        "weights_sum": float(
            sum(each.double().sum() for each in trainer.layout.trained.parameters())
        ),
        "figures": trainer.values[-1],
        "is_training": _is_training(trainer),
        "skipped": [each.get("loss_scale_overflow", 0.0) for each in trainer.values],
        "scale": trainer.scale.value if trainer.scale is not None else 1.0,
        "seconds": time.monotonic() - began,
    }
    if whole is not None:
        torch.save({k: v.detach() for k, v in whole.named_parameters()}, folder / "weights.pt")
    return found


def _is_training(trainer: Seen) -> bool:
    """Tell whether the layers run as a training's: in evaluation none is computed again."""
    parts = getattr(trainer.layout, "stages", [trainer.model])
    return all(each.training for part in parts for each in part.modules())


def run_chain(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Take the chain's training up where fewer ranks left it, and train on to the next link."""
    link = list(CHAIN).index(ranks.size) if ranks.size in CHAIN else 0
    if not link and ranks.size > 1:
        return {}
    stop_at = [*BROKEN_OFF, 0][link]
    return run_case("llama", CHAIN[ranks.size] or None, ranks, folder / "chain", stop_at)


def _on_rank(ranks: Ranks, folder: Path) -> None:
    found, size = {}, ranks.size
    apart = APART.get(" ".join(sys.argv[2:]))
    beside = LESS | SCALED if size == 2 else {}
    for name, options in (apart[size] if apart else CASES[size] | beside).items():
        if sys.argv[2:] and not apart and name not in sys.argv[2:]:
            continue
        num = micro_batches_of(name, options)
        found[name] = run_case(model_of(name), options, ranks, folder / name, micro_batches=num)
    if not apart:
        found["chain"] = run_chain(ranks, folder)
    (folder / f"{size}-{ranks.rank}.json").write_text(json.dumps(found))


def import_what_training_imports() -> None:
    """Load, once for all ranks, what a first step loads; no gradients: forks could make none."""
    for name in [*MODELS, "distilbert"]:
        model = built(name)
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 4, dtype=torch.long))
        for each in model.parameters():
            each.grad = torch.zeros_like(each)
        build_optimizer(model, 1e-3).step()


def main() -> None:
    """Run all layouts, or those named, below the folder."""
    torch.set_num_threads(1)
    import_what_training_imports()
    folder = Path(sys.argv[1])
    for size in APART.get(" ".join(sys.argv[2:]), CASES):
        if any(ends := forked(size, lambda ranks: _on_rank(ranks, folder))):
            sys.exit(f"{size} ranks ended with {ends}")


if __name__ == "__main__":
    main()
