"""The data of a training plan: fields of its job spec, and their description."""

from typing import Any

from pydantic import ValidationError

from runners.jobspec import (
    DataParallel,
    FileData,
    HostText,
    MixedData,
    SampleOptions,
    TrainData,
    TrainSpec,
    UploadedData,
)
from runners.jobspec.data import weights_of
from webapp.accounts.models import Team
from webapp.core.units import percent
from webapp.datasets.models import Dataset
from webapp.plans.errors import DraftProblem
from webapp.plans.models import Plan

Draft = dict[str, Any]
MIX_ROWS = range(1, 5)  # rows of a mixture in the wizard


def shared_out(
    spec: TrainSpec, policy: DataParallel, processes: int, plan: Plan
) -> dict[str, Any]:
    """Return a training's data fields and its ranks' policy."""
    is_fixed = spec.layout is not None and not spec.layout.is_pipeline_alone
    if is_fixed and policy.on_lost_rank == "shrink":
        policy = DataParallel()  # such a layout has a fixed number of ranks
    parallel = policy.model_copy(update={"processes_per_host": processes})
    return {"parallel": parallel, **data_fields(plan.draft, plan.team)}


def data_fields(draft: Draft, team: Team) -> dict[str, Any]:
    """Return ``data`` and ``samples`` of a training's spec.

    Raises:
        DraftProblem: the chosen file is gone, or the options are invalid.
    """
    values = draft["workload"][draft["goal"]["goal"]]
    try:
        data = _data(values, team)
        samples = SampleOptions.model_validate(
            {name: values[name] for name in ("rows", "too_long") if values.get(name)}
        )
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise DraftProblem(
            f"The training data cannot be read: {message}.", "data_source"
        ) from error
    return {"data": data, "samples": samples}


def _data(values: dict[str, Any], team: Team) -> TrainData:
    source, stated = values.get("data_source") or "host", values.get("data_format") or None
    if source == "file":
        return FileData(path=str(values.get("data_path") or ""), format=stated)
    if source == "upload":
        return _uploaded(str(values.get("dataset") or ""), team)
    return _mixed(values, team) if source == "mixed" else HostText()


def _mixed(values: dict[str, Any], team: Team) -> MixedData:
    is_dynamic = values.get("mix_weights") == "dynamic"
    parts = []
    for row in MIX_ROWS:
        source = values.get(f"mix_source_{row}") or ""
        if not source:
            continue
        fields = {"data_source": source, "data_path": values.get(f"mix_path_{row}")}
        if source not in {"host", "file"}:
            fields = {"data_source": "upload", "dataset": source}
        part = {"data": _data(fields, team), "weight": values.get(f"mix_weight_{row}")}
        if is_dynamic:
            part["reference_loss"] = values.get(f"mix_reference_{row}")
        parts.append(part)
    if not is_dynamic:
        return MixedData.model_validate({"parts": parts})
    moving = {"weights": "dynamic", "update_every_steps": values.get("mix_every")}
    return MixedData.model_validate({"parts": parts, **moving})


def _uploaded(dataset_id: str, team: Team) -> UploadedData:
    dataset = Dataset.objects.filter(team=team, pk=dataset_id).first()
    if dataset is None:
        raise DraftProblem(
            "No uploaded file is chosen, or it was deleted. Upload one, or choose the host's own "
            "text.",
            "dataset",
        )
    return UploadedData.model_validate(
        {
            "dataset_id": dataset.pk,
            "name": dataset.name,
            "sha256": dataset.sha256,
            "size_bytes": dataset.size_bytes,
            "format": dataset.format,
        }
    )


def text_words(data: TrainData) -> str:
    """Return a description of a training's data for a sentence."""
    if isinstance(data, UploadedData):
        return f"the uploaded {data.name}"
    if isinstance(data, FileData):
        return f"its file {data.path}"
    if isinstance(data, HostText):
        return "its own text"
    shares = zip(weights_of(data), data.parts, strict=True)
    mixture = " and ".join(f"{percent(share)} {text_words(part.data)}" for share, part in shares)
    moving = f" by weights that move every {data.update_every_steps:,} steps"
    return mixture if data.weights == "fixed" else f"at first {mixture}{moving}"
