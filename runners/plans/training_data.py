"""The data of a training: the source, a file, an upload or a mixture, as fields of its spec."""

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ValidationError

from runners.jobspec import (
    FileData,
    HostText,
    MixedData,
    SampleOptions,
    TrainData,
    UploadedData,
)
from runners.plans.data_set import DataSet
from runners.plans.refusals import DraftProblem, first_message
from runners.plans.workloads import NAMED_SOURCES, MixtureSource, TrainingData

Uploads = Mapping[str, UploadedData]  # by the id of the uploaded file


def uploads_named(values: TrainingData) -> frozenset[str]:
    """Return the ids of the uploaded files that a training reads."""
    if values.data_source == "upload":
        return frozenset({values.dataset})
    if values.data_source != "mixed":
        return frozenset()
    return frozenset(row.source for row in values.mixture) - {"host", *NAMED_SOURCES}


def data_fields(values: TrainingData, uploads: Uploads) -> dict[str, Any]:
    """Return ``data`` and ``samples`` of a training's spec.

    Raises:
        DraftProblem: the chosen file is gone, or the options are invalid.
    """
    try:
        data = _data(values, uploads)
        samples = SampleOptions(
            rows=values.rows,
            too_long=values.too_long,
            packing_strategy=values.packing_strategy,
        )
    except ValidationError as error:
        message = f"The training data cannot be read: {first_message(error)}."
        raise DraftProblem(message, "data_source") from error
    return {"data": data, "samples": samples}


# What a change states of the training text, and the source that it is of.
SOURCE_OF = {"data_repository": "hub", "data_path": "file", "dataset": "upload"}


def follow_data(workload: Mapping[str, Any], changed: Collection[str]) -> dict[str, Any]:
    """Return a workload whose source is that of the text which a change names.

    >>> follow_data({"data_source": "host", "data_repository": "o/n"}, ["data_repository"])
    {'data_source': 'hub', 'data_repository': 'o/n'}
    """
    named = [SOURCE_OF[name] for name in changed if name in SOURCE_OF and workload.get(name)]
    is_stated = "data_source" in changed or len(set(named)) != 1
    return {**workload} if is_stated else {**workload, "data_source": named[0]}


def _data(values: TrainingData, uploads: Uploads) -> TrainData:
    if values.data_source == "hub":
        return values.hub_data(values.data_format)
    if values.data_source == "file":
        return FileData(
            path=values.data_path,
            format=values.data_format,
            columns=values.column_names,
            records=values.data_records,
        )
    if values.data_source == "upload":
        return _uploaded(values.dataset, uploads)
    return _mixed(values, uploads) if values.data_source == "mixed" else HostText()


def _mixed(values: TrainingData, uploads: Uploads) -> MixedData:
    is_dynamic = values.mixture_weights == "dynamic"
    parts = [
        {
            "data": _source(row, uploads),
            "weight": row.weight,
            **({"reference_loss": row.reference_loss} if is_dynamic else {}),
        }
        for row in values.mixture
    ]
    if not is_dynamic:
        return MixedData.model_validate({"parts": parts})
    moving = {"weights": "dynamic", "update_every_steps": values.mixture_update_every_steps}
    return MixedData.model_validate({"parts": parts, **moving})


def _source(row: MixtureSource, uploads: Uploads) -> TrainData:
    if row.source == "file":
        return FileData(path=row.path)
    if row.source == "hub":
        return DataSet(data_repository=row.path).hub_data()
    return HostText() if row.source == "host" else _uploaded(row.source, uploads)


def _uploaded(dataset_id: str, uploads: Uploads) -> UploadedData:
    if dataset_id not in uploads:
        raise DraftProblem(
            "No uploaded file is chosen, or it was deleted. Upload one, or choose the host's own "
            "text.",
            "dataset",
        )
    return uploads[dataset_id]
