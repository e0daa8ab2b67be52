"""Training a classification head: its labelled data, and the encoder that it stands on."""

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions without.

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from runners.classification import ENCODERS
from runners.jobs.corpus import Corpus
from runners.jobs.loading import library_fields, ready
from runners.jobs.model_files import check_config
from runners.jobs.model_folders import opened_model
from runners.jobs.runtime import BadInputError, Job
from runners.jobs.train.labelled import (
    Classes,
    JudgedLabels,
    LabelledBatches,
    LabelledRows,
    read_classes,
)
from runners.jobs.train.passages import passages
from runners.jobs.train.samples import DataFile
from runners.jobs.train.sources import Data, opened
from runners.jobs.weight_checks import check_files, check_finite, check_loaded, first_line
from runners.jobspec import DemoModel, FileData, HostText, RandomModel, TrainSpec, UploadedData

HEAD = ("pre_classifier.", "classifier.")  # made here where a folder lacks them
OTHER_HEADS = ("vocab_", "qa_outputs.")  # of what the folder's model was trained for
DROPOUTS = ("dropout", "attention_dropout", "seq_classif_dropout")


def read_labelled(
    job: Job, spec: TrainSpec, tokenizer: PreTrainedTokenizerFast, corpus: Corpus
) -> Data:
    """Return labelled data: a file's, or passages of the host's own text.

    Raises:
        MissingModelError: a file is not where the spec says.
        BadInputError: a file, or a record of it, cannot be learnt from.
    """
    source = spec.data
    opening: AbstractContextManager[DataFile]
    if isinstance(source, FileData | UploadedData):
        opening = opened(job, source)
    elif isinstance(source, HostText):
        opening = contextlib.nullcontext(passages(corpus))
    else:
        raise BadInputError("classes come from one file; leave the other sources out")
    with opening as file:
        digest = file.digest()
        found = read_classes(file, tokenizer, spec.sequence_length)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    batches = LabelledBatches(LabelledRows(found.train), spec, int(padding))
    size = spec.micro_batch_size
    judged = JudgedLabels(found.held_out, len(found.names), size, int(padding))
    measured = _measured(found) | {"padding_share": batches.shares().padding}
    notes = {
        "data": f"{file.name} (classification, sha256 {digest[:12]})",
        "classes": ", ".join(found.names),
        "samples": f"one a row; what is longer than {spec.sequence_length} tokens is cut",
        "padding_share": "over the first epoch, or its first thousand micro-batches",
        "accuracy": "on samples that were kept from training by their content; f1 is the mean "
        "over the classes",
    }
    if found.num_empty:
        notes["data_remarks"] = f"{found.num_empty} empty records are left out"
    return Data(batches, judged, digest, measured, notes, found.names)


def _measured(found: Classes) -> dict[str, float]:
    return {
        "data_documents": float(len(found.train)),
        "data_held_out": float(len(found.held_out)),
        "data_tokens": float(len(found.train.ids)),
        "data_cut": float(found.num_cut),
        "data_classes": float(len(found.names)),
    }


def classifier(
    job: Job,
    spec: TrainSpec,
    classes: tuple[str, ...],
    tokenizer: PreTrainedTokenizerFast,
    device: torch.device,
) -> PreTrainedModel:
    """Return an encoder with fp32 weights and a head for these classes, without dropout.

    A folder's encoder keeps its weights; a head for other classes is made anew.

    Raises:
        MissingModelError: the folder is not where the spec says.
        BadInputError: the model is no encoder, or reads fewer tokens or words than are given.
    """
    if isinstance(spec.model, RandomModel):
        config = _random_config(spec.model.config, tokenizer)
        _finish(config, classes, spec)
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        return ready(model, device=device)
    if isinstance(spec.model, DemoModel):
        raise BadInputError("the demo model predicts text; name an encoder's folder or its config")
    folder = opened_model(spec.model, job.host_dir)
    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    has_these = set(getattr(config, "label2id", {}) or {}) == set(classes)
    _finish(config, classes, spec)
    check_files(folder)
    try:
        found: Any = AutoModelForSequenceClassification.from_pretrained(
            str(folder), config=config, use_safetensors=True, local_files_only=True,
            trust_remote_code=False, output_loading_info=True, ignore_mismatched_sizes=True,
            dtype=torch.float32,
        )  # fmt: skip
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        msg = f"cannot load {folder} as an encoder: {first_line(error)}"
        raise BadInputError(msg) from error
    model, info = found
    check_loaded(folder, _beside_heads(info))
    check_finite(model)
    if not has_these:
        for part in (model.pre_classifier, model.classifier):
            torch.nn.init.normal_(part.weight, std=config.initializer_range)
            torch.nn.init.zeros_(part.bias)
    return ready(model, device=device)


def _random_config(
    config: dict[str, object], tokenizer: PreTrainedTokenizerFast
) -> PretrainedConfig:
    check_config(config, "the job's model")
    model_type = str(config.get("model_type", ""))
    _check_encoder(model_type)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos")}
    known = {name: value for name, value in config.items() if name != "num_labels"}
    try:
        found: PretrainedConfig = AutoConfig.for_model(
            model_type, **library_fields(model_type, known | ids)
        )
    except (StrictDataclassError, ValueError, KeyError, TypeError, AttributeError) as error:
        msg = f"config.json describes no model that can be built here: {first_line(error)}"
        raise BadInputError(msg) from error
    return found


def _finish(config: PretrainedConfig, classes: tuple[str, ...], spec: TrainSpec) -> None:
    """Give a config its classes, and take its dropout: a step is the same on all ranks."""
    _check_encoder(config.model_type)
    if spec.sequence_length > config.max_position_embeddings:
        raise BadInputError(
            f"sequence_length is {spec.sequence_length}, and the model has "
            f"{config.max_position_embeddings} positions; take at most as many"
        )
    config.id2label = dict(enumerate(classes))
    config.label2id = {name: at for at, name in enumerate(classes)}
    for name in DROPOUTS:
        setattr(config, name, 0.0)


def _check_encoder(model_type: str) -> None:
    if model_type not in ENCODERS:
        raise BadInputError(
            f"objective is classification, and the model is {model_type or 'nameless'}: its head "
            f"stands on {', '.join(ENCODERS)}; choose such a model, or another objective"
        )


def _beside_heads(info: dict[str, Any]) -> dict[str, Any]:
    """Return what loading found, without heads that are made anew or were for another task."""
    odd = info.get("mismatched_keys") or ()
    return {
        "missing_keys": [x for x in info.get("missing_keys") or () if not x.startswith(HEAD)],
        "unexpected_keys": [
            x for x in info.get("unexpected_keys") or () if not x.startswith(OTHER_HEADS)
        ],
        "mismatched_keys": [each for each in odd if not each[0].startswith(HEAD)],
    }
