"""Training of a classification head: its labelled data and its encoder."""

import contextlib
import io
import json
from collections.abc import Iterator
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

from runners.datasets.records import left_out_words, part_words
from runners.jobs.corpus import Corpus
from runners.jobs.data_files import DataFile, open_source
from runners.jobs.loading import library_fields, ready
from runners.jobs.model_files import check_config, opened_model
from runners.jobs.runtime import BadInputError, Job
from runners.jobs.train.sources import (
    Classes,
    Data,
    LabelEvaluator,
    LabelledBatches,
    LabelledRows,
    read_classes,
)
from runners.jobs.weights import check_files, check_finite, check_loaded, config_of, first_line
from runners.jobspec import (
    DemoModel,
    DownloadedData,
    FileData,
    HostText,
    RandomModel,
    TrainSpec,
    UploadedData,
)
from runners.jobspec.base import ENCODERS, PACKAGES

# Built-in labelled text: passages of Python's standard library, labelled by package.


PASSAGE_LINES = 8  # about 80 tokens, none of which contains the file's name
NAME = "passages of Python's library.jsonl"


def passages(corpus: Corpus) -> DataFile:
    """Return the passages as a labelled data file; the same Python gives the same file.

    Raises:
        BadInputError: this Python lacks one of the packages.
    """
    lines = list(_lines(corpus))
    if missing := sorted(set(PACKAGES) - {label for _, label in lines}):
        raise BadInputError(
            f"this host's Python has no files of {', '.join(missing)}, whose passages are to be "
            "told apart; give a file with “text” and “label” instead"
        )
    written = "".join(f"{json.dumps({'text': text, 'label': label})}\n" for text, label in lines)
    return DataFile(NAME, io.BytesIO(written.encode()), "classification")


def _lines(corpus: Corpus) -> Iterator[tuple[str, str]]:
    """Yield each passage with its package, in the corpus's order."""
    for document in corpus.documents:
        root, _, rest = document.name.partition("/")
        package = rest.partition("/")[0]
        if root != "python" or package not in PACKAGES:
            continue
        lines = [line for line in document.text.splitlines(keepends=True) if line.strip()]
        for at in range(0, len(lines) - PASSAGE_LINES + 1, PASSAGE_LINES):
            yield "".join(lines[at : at + PASSAGE_LINES]), package


# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions untyped.


HEAD = ("pre_classifier.", "classifier.")  # initialised if the folder lacks them
OTHER_HEADS = ("vocab_", "qa_outputs.")  # heads of other tasks in the folder's model
DROPOUTS = ("dropout", "attention_dropout", "seq_classif_dropout")


def read_labelled(
    job: Job, spec: TrainSpec, tokenizer: PreTrainedTokenizerFast, corpus: Corpus
) -> Data:
    """Return labelled data: from a file, or passages of the host's own text.

    Raises:
        MissingModelError: a file does not exist.
        BadInputError: a file, or one of its records, is invalid.
    """
    source = spec.data
    opening: AbstractContextManager[DataFile]
    if isinstance(source, FileData | UploadedData | DownloadedData):
        opening = open_source(job, source)
    elif isinstance(source, HostText):
        opening = contextlib.nullcontext(passages(corpus))
    else:
        raise BadInputError("classes come from one file; leave the other sources out")
    with opening as file:
        digest = file.digest()
        classes = read_classes(file, tokenizer, spec.sequence_length)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    batches = LabelledBatches(LabelledRows(classes.train), spec, int(padding))
    size = spec.micro_batch_size
    evaluator = LabelEvaluator(classes.held_out, len(classes.names), size, int(padding))
    measured = _measured(classes) | {"padding_share": batches.shares().padding}
    notes = {
        "data": f"{file.name} (classification, sha256 {digest[:12]})",
        "classes": ", ".join(classes.names),
        "samples": f"one a row; what is longer than {spec.sequence_length} tokens is cut",
        "padding_share": "over the first epoch, or its first thousand micro-batches",
        "accuracy": "on samples that were kept from training by their content; f1 is the mean "
        "over the classes",
    }
    remarks = [left_out_words(classes.left_out)] if classes.left_out else []
    if classes.num_empty:
        remarks.append(f"{classes.num_empty} empty records are left out")
    if part := part_words(file.name):
        remarks.append(part)
    if remarks:
        notes["data_remarks"] = "; ".join(remarks)
    return Data(batches, evaluator, digest, measured, notes, classes.names)


def _measured(classes: Classes) -> dict[str, float]:
    return {
        "data_documents": float(len(classes.train)),
        "data_held_out": float(len(classes.held_out)),
        "data_tokens": float(len(classes.train.ids)),
        "data_cut": float(classes.num_cut),
        "data_classes": float(len(classes.names)),
    }


def classifier(
    job: Job,
    spec: TrainSpec,
    classes: tuple[str, ...],
    tokenizer: PreTrainedTokenizerFast,
    device: torch.device,
) -> PreTrainedModel:
    """Return an encoder with fp32 weights and a head for these classes, without dropout.

    A folder's encoder keeps its weights; a head for other classes is initialised.

    Raises:
        MissingModelError: the folder does not exist.
        BadInputError: the model is not an encoder, or has too few positions.
    """
    if isinstance(spec.model, RandomModel):
        config = _random_config(spec.model.config, tokenizer)
        _configure(config, classes, spec)
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        return ready(model, device=device)
    if isinstance(spec.model, DemoModel):
        raise BadInputError("the demo model predicts text; name an encoder's folder or its config")
    folder = opened_model(spec.model, job.host_dir)
    config = config_of(folder)
    has_these = set(getattr(config, "label2id", {}) or {}) == set(classes)
    _configure(config, classes, spec)
    check_files(folder)
    try:
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            str(folder), config=config, use_safetensors=True, local_files_only=True,
            trust_remote_code=False, output_loading_info=True, ignore_mismatched_sizes=True,
            dtype=torch.float32,
        )  # fmt: skip
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        msg = f"cannot load {folder} as an encoder: {first_line(error)}"
        raise BadInputError(msg) from error
    model, info = loaded
    check_loaded(folder, _without_heads(info))
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
    fields = {name: value for name, value in config.items() if name != "num_labels"}
    try:
        built: PretrainedConfig = AutoConfig.for_model(
            model_type, **library_fields(model_type, fields | ids)
        )
    except (StrictDataclassError, ValueError, KeyError, TypeError, AttributeError) as error:
        msg = f"config.json describes no model that can be built here: {first_line(error)}"
        raise BadInputError(msg) from error
    return built


def _configure(config: PretrainedConfig, classes: tuple[str, ...], spec: TrainSpec) -> None:
    """Set a config's classes and disable its dropout, so that a step is the same on all ranks."""
    _check_encoder(config.model_type)
    if spec.sequence_length > config.max_position_embeddings:
        raise BadInputError(
            f"sequence_length is {spec.sequence_length}, and the model has "
            f"{config.max_position_embeddings} positions; choose at most "
            f"{config.max_position_embeddings}"
        )
    config.id2label = dict(enumerate(classes))
    config.label2id = {name: at for at, name in enumerate(classes)}
    for name in DROPOUTS:
        setattr(config, name, 0.0)


def _check_encoder(model_type: str) -> None:
    if model_type not in ENCODERS:
        raise BadInputError(
            f"objective is classification, and the model_type is {model_type or 'missing'}: it "
            f"must be {', '.join(ENCODERS)}; choose such a model, or another objective"
        )


def _without_heads(info: dict[str, Any]) -> dict[str, Any]:
    """Return the loading report without heads that are initialised here or of other tasks."""
    mismatched = info.get("mismatched_keys") or ()
    return {
        "missing_keys": [x for x in info.get("missing_keys") or () if not x.startswith(HEAD)],
        "unexpected_keys": [
            x for x in info.get("unexpected_keys") or () if not x.startswith(OTHER_HEADS)
        ],
        "mismatched_keys": [each for each in mismatched if not each[0].startswith(HEAD)],
    }
