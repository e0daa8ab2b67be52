"""Which layout a training has: replicas of the model, or sharded."""

import torch
from transformers import PreTrainedModel

from runners.jobs.ranks import Ranks
from runners.jobs.train.layout import Layout, Replicas
from runners.jobs.train.layout_sharded import ShardedLayout
from runners.jobs.train.layout_states import check_world
from runners.jobs.train.layout_tensor import CompressedReplicas, LocalReplicas
from runners.jobspec import TrainSpec


def chosen_layout(
    model: PreTrainedModel, spec: TrainSpec, device: torch.device, ranks: Ranks
) -> Layout:
    """Return the layout for the spec: replicas, or a sharded layout.

    Raises:
        BadInputError: the layout has a different number of ranks, or cannot divide this model.
    """
    options = spec.layout
    if options is not None and spec.parallel.on_lost_rank == "shrink":
        options = options.with_pipeline_ranks(ranks.size)
    if options is not None:
        check_world(options, ranks)
    if options is None:
        return Replicas(model, spec.compute_dtype, device, ranks)
    if not options.is_unsharded:
        return ShardedLayout(model, options, spec.compute_dtype, device, ranks)
    if options.gradient_compression is not None:
        return CompressedReplicas(model, spec.compute_dtype, device, ranks, options)
    if options.synchronization_interval_steps > 1:
        return LocalReplicas(model, spec.compute_dtype, device, ranks, options)
    return Replicas(model, spec.compute_dtype, device, ranks)
