"""The teacher of a distillation by TRL: its folder, and whether its tokens are the student's."""

# mypy: disable-error-code="no-untyped-call"
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from runners.jobs.inputs import digest_of_model
from runners.jobs.loading import TORCH_DTYPES, stored_quantisation
from runners.jobs.model_files import opened_model
from runners.jobs.runtime import BadInputError, Job
from runners.jobs.weights import first_line
from runners.jobspec import ArtefactModel, FolderModel, TrainSpec

SHOWN_TOKENS = 3


def opened_teacher(job: Job, spec: TrainSpec) -> Path | None:
    """Return the folder of the teacher's weights, None of a training without one.

    Raises:
        BadInputError: it is no folder on this host, or its weights are quantised.
    """
    if spec.teacher is None:
        return None
    if not isinstance(spec.teacher, FolderModel | ArtefactModel):
        raise BadInputError(f"teacher: a '{spec.teacher.source}' model was not downloaded")
    folder = opened_model(spec.teacher, job.host_dir)
    if stored_quantisation(folder) is not None:
        raise BadInputError(
            f"teacher: {folder} holds quantised weights; name its unquantised model"
        )
    return folder


def teacher_digest(job: Job, spec: TrainSpec) -> dict[str, str]:
    """Return the SHA-256 of the teacher's weights by its name, {} without one."""
    return {"teacher": digest_of_model(spec.teacher, job.host_dir)} if spec.teacher else {}


def check_vocabularies(
    student: Path, tokenizer: PreTrainedTokenizerBase, teacher: Path, tokens: int
) -> list[str]:
    """Check that both models' probabilities are of the same tokens; return remarks.

    ``tokens``: of the longest sequence, which the teacher reads whole.

    Raises:
        BadInputError: the vocabularies have other sizes, or a token another meaning; the
            teacher's context is shorter than a sequence.
    """
    sizes = [_vocabulary_size(each) for each in (student, teacher)]
    if sizes[0] != sizes[1]:
        raise BadInputError(
            f"teacher: {teacher.name} has {sizes[1]} tokens in its vocabulary (vocab_size), and "
            f"{student.name} has {sizes[0]}; distillation compares the probabilities of every "
            "token, so name a teacher of the same family with as many"
        )
    _check_context(teacher, tokens)
    own, other = (_by_id(each) for each in (tokenizer, _tokenizer(teacher)))
    unlike = sorted(at for at in own.keys() & other.keys() if own[at] != other[at])
    if unlike:
        shown = ", ".join(f"{at}: {own[at]!r} and {other[at]!r}" for at in unlike[:SHOWN_TOKENS])
        raise BadInputError(
            f"teacher: {teacher.name} has another tokenizer than {student.name}: {len(unlike):,} "
            f"ids stand for other tokens ({shown}); name a teacher with the same tokenizer"
        )
    alone = len(own.keys() ^ other.keys())
    return [f"{alone:,} tokens are in one tokenizer of student and teacher alone"] if alone else []


def _check_context(teacher: Path, tokens: int) -> None:
    config: Any = AutoConfig.from_pretrained(str(teacher), local_files_only=True)
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context is not None and tokens > context:
        raise BadInputError(
            f"teacher: {teacher.name} has a context of {context} tokens "
            f"(max_position_embeddings), and sequence_length is {tokens}; shorten the sequences, "
            "or name a teacher with a longer context"
        )


def _vocabulary_size(folder: Path) -> int:
    config: Any = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    return int(config.get_text_config().vocab_size)


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    try:
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True
        )
    except Exception as error:  # tokenizers raises nothing narrower
        raise BadInputError(
            f"teacher: the tokenizer of {folder.name} cannot be read: {first_line(error)}; copy "
            "tokenizer.json and tokenizer_config.json again"
        ) from error
    return loaded


def _by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {at: token for token, at in tokenizer.get_vocab().items()}


def teacher_arguments(spec: TrainSpec, device: torch.device) -> dict[str, Any]:
    """Return how TRL loads the teacher: frozen, so in the dtype of the products."""
    dtype = str(TORCH_DTYPES[spec.compute_dtype]).removeprefix("torch.")
    return {"teacher_model_init_kwargs": {"dtype": dtype, "device_map": str(device)}}


def how_taught(spec: TrainSpec, teacher: Path) -> str:
    """Return whose probabilities are learnt, and by which divergence."""
    kind = {0.0: "forward KL", 1.0: "reverse KL"}.get(spec.beta, "generalised Jensen-Shannon")
    return (
        f"{teacher.name}: {kind} divergence (beta {spec.beta:g}) at temperature "
        f"{spec.temperature:g}, of the trained model's own answers"
    )
