"""Documents with the field names of before the first release, read as those of release 0.1.

Frozen: the migrations ``plans.0002``, ``plans.0003`` and ``tunings.0002`` rewrite stored documents
by these tables, so they state names and units themselves and import nothing that changes with the
documents. A later rename needs a table and a migration of its own.
"""

from collections.abc import Callable, Mapping
from typing import Any

Values = dict[str, Any]
MINUTE, HOUR, MILLION = 60.0, 3600.0, 1e6
POOLS = ("prefill_devices", "decode_devices")  # now the pin ``disaggregated``


def _number(factor: float, *, whole: bool = False) -> Callable[[Any], Any]:
    def in_units(value: Any) -> Any:  # noqa: ANN401 -- JSON of any shape
        if not isinstance(value, int | float) or isinstance(value, bool):
            return value
        scaled = float(f"{value * factor:.15g}")  # 41 per cent are 0.41
        return round(scaled) if whole else scaled

    return in_units


def _word(**words: Any) -> Callable[[Any], Any]:
    return lambda value: words.get(str(value).replace("-", "_"), value)


def _same(value: Any) -> Any:  # noqa: ANN401 -- JSON of any shape
    return value


def _digit(value: Any) -> Any:  # noqa: ANN401 -- JSON of any shape
    return int(value) if isinstance(value, str) and value.isdecimal() else None


# Old name -> the name of today, and its value.
Renames = Mapping[str, tuple[str, Callable[[Any], Any]]]
WORKLOAD: Renames = {
    "prefix_share_percent": ("prefix_share_ratio", _number(0.01)),
    "guessing": ("speculation", lambda value: value or None),
    "decode_step": ("compiled_step", lambda value: value == "compiled"),
    "lengths": ("length_schedule", _word(fixed="constant")),
    "rounding": ("qat_bits", _digit),
    "products": ("compute_dtype", _same),
    "training_step": ("compiled", lambda value: value == "compiled"),
    "early_stop": ("early_stop_validations", _digit),
    "exported_weights": ("keep_best", lambda value: value != "last"),
    "text_samples": ("text_samples_every_steps", _digit),
    "time_budget_minutes": ("time_budget_seconds", _number(MINUTE)),
    "million_tokens": ("tokens", _number(MILLION, whole=True)),
    "mix_weights": ("mixture_weights", _same),
    "mix_every": ("mixture_update_every_steps", _same),
}
LAUNCH: Renames = {
    "hours": ("max_duration_seconds", _number(HOUR)),
    "retries": ("max_retries", _same),
    "idle_minutes": ("idle_stop_seconds", _number(MINUTE)),
    "prefix_cache": ("prefix_caching", _same),
    "draft": ("draft_model", _same),
    "requests": ("requests_per_repetition", _same),
}
SOURCE: Renames = {"reference": ("reference_loss", _same)}


def renamed(values: object, names: Renames) -> Any:  # noqa: ANN401 -- JSON of any shape
    """Return an object with the names of today; a name of today that is given too wins."""
    if not isinstance(values, Mapping):
        return values
    today: Values = {}
    for name, value in values.items():
        new, read = names.get(name, (name, _same))
        if new == name:
            today[name] = value
        elif new not in values:
            today[new] = None if value is None else read(value)
    return today


def read_workload(values: object) -> Any:  # noqa: ANN401 -- JSON of any shape
    """Return a workload with the names of today."""
    workload = renamed(values, WORKLOAD)
    if isinstance(workload, dict) and isinstance(workload.get("mixture"), list):
        workload["mixture"] = [renamed(row, SOURCE) for row in workload["mixture"]]
    return workload


def read_document(values: object) -> Any:  # noqa: ANN401 -- JSON of any shape
    """Return a document with the names of today."""
    if not isinstance(values, Mapping):
        return values
    readers = {"workload": read_workload, "pins": _read_pins, "launch": read_launch}
    read = {name: readers.get(name, _same)(value) for name, value in values.items()}
    return with_one_trainer(read)


# A trainer was stated in ``workload.engine`` too: value there -> that of ``hardware.engine``.
TRAINERS = {"slipway": "torch", "trl": "trl"}
# What ``hardware.engine`` may be from another goal; it did not count for a training.
OF_ANSWERS = (
    "auto", "vllm", "sglang", "tensorrt_llm", "llama_cpp", "ik_llama_cpp", "ktransformers",
    "exllamav2", "flexgen", "gpt_fast",
)  # fmt: skip


def with_one_trainer(document: Mapping[str, Any]) -> Values:
    """Return a document whose hardware alone names its trainer, else the workload's.

    A workload's trainer that contradicts that of the hardware, or is none, is left: a document
    with it is refused by the field's name. In a stored draft, the workloads of other goals under
    ``wizard`` lose theirs, which say nothing of this goal's engine.
    """
    found = dict(document)
    wizard = found.get("wizard")
    if isinstance(wizard, Mapping) and isinstance(wizard.get("others"), Mapping):
        others = {goal: _without_engine(each) for goal, each in wizard["others"].items()}
        found["wizard"] = {**wizard, "others": others}
    workload, hardware = found.get("workload"), found.get("hardware") or {}
    if not isinstance(workload, Mapping) or "engine" not in workload:
        return found
    stated = workload["engine"]
    if stated is not None:
        engine = TRAINERS.get(str(stated))
        is_training = found.get("goal", "finetune") == "finetune"
        if engine is None or not is_training or not isinstance(hardware, Mapping):
            return found
        if hardware.get("engine") not in (None, "", engine, *OF_ANSWERS):
            return found
        found["hardware"] = {**hardware, "engine": engine}
    found["workload"] = _without_engine(workload)
    return found


def _without_engine(workload: object) -> object:
    if not isinstance(workload, Mapping):
        return workload
    return {name: value for name, value in workload.items() if name != "engine"}


def _read_pins(values: object) -> Any:  # noqa: ANN401 -- JSON of any shape
    """Return pins with the two pools of devices as the pin ``disaggregated``."""
    if not isinstance(values, Mapping) or not set(POOLS) & set(values):
        return values
    pools = {name: values[name] for name in POOLS if values.get(name) is not None}
    others = {name: value for name, value in values.items() if name not in POOLS}
    return {"disaggregated": pools or None, **others}


def read_launch(values: object) -> Any:  # noqa: ANN401 -- JSON of any shape
    """Return the options of a launch with the names of today."""
    return renamed(values, LAUNCH)
