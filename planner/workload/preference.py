"""Forward passes without gradients that objectives add to a training step, and its model's head.

A policy's own passes are those of supervised steps, over two sequences of each pair.

Source: huggingface/trl 1.16.0, trl/trainer/dpo_trainer.py, kto_trainer.py and reward_trainer.py.
"""

from typing import NamedTuple

from planner.specs.model import ModelSpec
from planner.specs.workload import REFERENCE_OBJECTIVES, TrainWorkload


class Forwards(NamedTuple):
    """How many forward passes over a micro-batch's records, and what they are called."""

    number: int = 0
    title: str = ""


NO_FORWARDS = Forwards()


def forwards_in_step(workload: TrainWorkload) -> Forwards:
    """Return the forward passes of a step beside the policy's own.

    A reference answers both sequences of DPO's pairs. KTO compares with answers to other prompts:
    the policy answers these too, and the reference answers both.

    >>> forwards_in_step(TrainWorkload(sequence_length=8, global_batch_size=2, objective="kto"))
    Forwards(number=3, title='Reference and KL forwards')
    """
    if workload.objective == "kto":
        alone = Forwards(1, "KL forward")
        return alone if workload.precompute_reference else Forwards(3, "Reference and KL forwards")
    if workload.generates:  # before the updates, see planner/workload/on_policy.py
        return NO_FORWARDS
    return Forwards(1, "Reference forward") if workload.has_reference else NO_FORWARDS


def forwards_before_steps(workload: TrainWorkload) -> Forwards:
    """Return the forward passes over all records before the first step: a reference's answers."""
    if not workload.precompute_reference or workload.objective not in REFERENCE_OBJECTIVES:
        return NO_FORWARDS
    return Forwards(2 if workload.objective == "kto" else 1, "Reference pass before the steps")


class _ScalarHead(ModelSpec):
    """A language model whose head is one score a token in place of the vocabulary."""

    @property
    def output_width(self) -> int:
        """Return the outputs per token."""
        return 1


def as_trained(model: ModelSpec, workload: object) -> ModelSpec:
    """Return a model as a training has it: a reward model with a head of its own, of one score."""
    if not isinstance(workload, TrainWorkload) or workload.objective != "reward":
        return model
    fields = {name: getattr(model, name) for name in ModelSpec.model_fields}
    own_head = {"tie_word_embeddings": False, "lm_head_bias": False}
    return _ScalarHead.model_construct(**{**fields, **own_head})
