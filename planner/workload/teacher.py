"""The teacher of a distillation: a frozen model that reads the completions of the trained one.

It predicts the probabilities of every token of the vocabulary, so that both must have the same.

Source: huggingface/trl 1.16.0, trl/trainer/distillation_trainer.py and
trl/kernels/chunked_divergence.py.
"""

from dataclasses import replace

from planner.catalog.models import get_model, model_from_config
from planner.cost.parameters import count_parameters
from planner.cost.weights import WIDE
from planner.specs.base import NotPossibleError, UnknownModelError
from planner.specs.model import ModelSpec
from planner.specs.workload import TrainWorkload
from planner.workload.setting import Setting

FIELD = "workload.teacher_model"
# Tiles of the vocabulary beside that of a single model's loss: the teacher's, in fp32 as the
# student's, which the kernel fills for both at once.
TILES = 2


def teacher_of(workload: TrainWorkload) -> ModelSpec | None:
    """Return the shape of a distillation's teacher, None of another training.

    Raises:
        UnknownModelError: the catalog has no such model.
    """
    given = workload.teacher_model if workload.is_distilled else None
    if given is None or isinstance(given, ModelSpec):
        return given
    if not isinstance(given, str):
        return model_from_config(given, str(given.get("_name_or_path") or "custom"))
    try:
        return get_model(given)
    except UnknownModelError as error:
        raise UnknownModelError(
            f"teacher_model is {given!r}, which is no model of the catalog (nearest: "
            f"{', '.join(error.nearest) or 'none'}); choose one, or give its config.json",
            FIELD,
            nearest=error.nearest,
        ) from error


def refuse_unlike_teacher(student: ModelSpec, workload: TrainWorkload) -> None:
    """Refuse a teacher that cannot be compared with the student token by token.

    Raises:
        NotPossibleError: the vocabularies differ, or the teacher predicts no text, is quantised
            or has a shorter context than the sequences.
        UnknownModelError: the catalog has no such model.
    """
    teacher = teacher_of(workload)
    if teacher is None:
        return
    if teacher.is_encoder:
        raise NotPossibleError(
            f"teacher_model {teacher.id} is an encoder, which predicts no text: choose a decoder",
            FIELD,
        )
    if teacher.vocab_size != student.vocab_size:
        raise NotPossibleError(
            f"teacher_model {teacher.id} has {teacher.vocab_size} tokens in its vocabulary, "
            f"{student.id} has {student.vocab_size}: distillation compares the probabilities of "
            "every token, so choose a teacher of the student's family with as many",
            FIELD,
        )
    if teacher.weight_dtype is not None and teacher.weight_dtype not in WIDE:
        raise NotPossibleError(
            f"teacher_model {teacher.id} is stored in {teacher.weight_dtype}, and a teacher is "
            "loaded in 16 or 32 bits: name its unquantised model",
            FIELD,
        )

    if (tokens := workload.sequence_length) > teacher.max_position_embeddings:
        raise NotPossibleError(
            f"teacher_model {teacher.id} has a context of {teacher.max_position_embeddings} "
            f"tokens (max_position_embeddings), and sequence_length is {tokens}: the teacher "
            "reads whole sequences, so shorten them, or choose a teacher with a longer context",
            FIELD,
        )


def teacher_setting(setting: Setting, workload: TrainWorkload) -> Setting | None:
    """Return the trainer's setting with the teacher in place of the student, None without one.

    It is sharded as the student, and its weights have the dtype of the products, in which
    Slipway's jobs load it. ``trl distillation`` itself loads it in fp32 unless ``--dtype`` is set.
    """
    model = teacher_of(workload)
    if model is None:
        return None
    compute = setting.strategy.compute_dtype
    dtype = compute if compute in WIDE else setting.generating_dtype
    plain = {"weight_dtype": dtype, "quantization": None, "group_size": None, "offload": None}
    strategy = setting.strategy.model_copy(update=plain)
    return replace(setting, model=model, counts=count_parameters(model), strategy=strategy)


def as_read_by_teacher(workload: TrainWorkload) -> TrainWorkload:
    """Return the training whose forward pass is a teacher's, which has no adapters."""
    return workload.model_copy(update={"method": "full", "lora_rank": None})
