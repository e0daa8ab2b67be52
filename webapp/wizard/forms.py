"""Forms of the goal, model and hardware steps, and the form fields of all steps."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, NamedTuple

from django import forms
from django.core.files.uploadedfile import UploadedFile
from django.core.validators import BaseValidator

from planner.catalog.devices import devices_of_every_size
from planner.catalog.models import checkpoint_name, list_models, model_from_config
from planner.specs.base import PlannerError
from runners.datasets.text import MAX_CONFIG_DEPTH, TextError, read_json, read_text
from webapp.core.display import gib, listed, sentence
from webapp.core.numbers import DecimalField, WholeField
from webapp.hosts.models import Host, Pool
from webapp.modelhub.models import TeamModel
from webapp.plans.questions import DEFAULT_PERCENTILE

# Form fields of the wizard: numbers whose errors state the limits, catalog choices.


MAX_CONFIG_BYTES = 256 * 1024
MAX_DIGITS = 18  # of an integer; no model has a longer one
Choices = list[tuple[str, Any]]


class WholeNumber(WholeField):
    """A whole number whose error names the value and the limits."""

    def __init__(self, label: str, low: int, high: int, hint: str = "", **options: Any) -> None:
        super().__init__(label=label, min_value=low, max_value=high, help_text=hint, **options)
        limits = f"It must be a whole number from {low:,} to {high:,}."
        self.error_messages |= {"required": f"{label} is missing. {limits}", "invalid": limits}
        _name_limits(self, label, limits)


class DecimalNumber(DecimalField):
    """A number whose error names the limits."""

    def __init__(
        self, label: str, low: float, high: float, hint: str = "", **options: Any
    ) -> None:
        super().__init__(label=label, min_value=low, max_value=high, help_text=hint, **options)
        limits = f"It must be a number from {low:g} to {high:g}."
        self.error_messages |= {"invalid": limits}
        _name_limits(self, label, limits)

    def prepare_value(self, value: object) -> object:
        """Return the value to show: a whole number without a decimal point."""
        return int(value) if isinstance(value, float) and value.is_integer() else value


class Option(forms.ChoiceField):
    """An optional choice; its default is the first of its list."""

    def __init__(self, label: str, choices: Choices, hint: str = "") -> None:
        super().__init__(label=label, choices=choices, help_text=hint, required=False)
        self.usual = choices[0][0]


class OptionalText(forms.CharField):
    """Optional lines of text."""

    usual = ""

    def __init__(self, label: str, hint: str = "") -> None:
        area = forms.Textarea(attrs={"rows": 3})
        super().__init__(label=label, help_text=hint, required=False, widget=area)


def show_only_for(field: forms.Field, methods: Iterable[str]) -> None:
    """Show a field only for these choices of the form's method; always without JavaScript."""
    field.widget.attrs["data-asked-for"] = " ".join(methods)


def _name_limits(field: forms.Field, label: str, limits: str) -> None:
    """Make a field's errors state the field, the value and the limits."""
    for validator in field.validators:
        if isinstance(validator, BaseValidator):
            validator.message = f"{label} is %(show_value)s. {limits}"


class ConfigJson(forms.CharField):
    """The text of a Hugging Face ``config.json``, cleaned to a dict."""

    widget = forms.Textarea

    def __init__(self, label: str, hint: str = "", **options: Any) -> None:
        super().__init__(label=label, help_text=hint, required=False, **options)
        self.widget.attrs |= {"rows": 8, "spellcheck": "false"}

    def prepare_value(self, value: object) -> object:
        """Return the text to show for a stored object."""
        return json.dumps(value, indent=2) if isinstance(value, dict) else value

    def to_python(self, value: object) -> Any:  # noqa: ANN401 -- no text, as Django has it
        """Return the object; reject invalid JSON with the position of the error."""
        text = super().to_python(value)
        return parse_config(text) if text else {}


def parse_config(text: str) -> dict[str, Any]:
    """Return the JSON object in ``text``; a byte order mark before it is no content.

    Raises:
        ValidationError: the text is too long, invalid JSON, or not an object.
    """
    if len(text.encode(errors="surrogatepass")) > MAX_CONFIG_BYTES:
        raise _too_long(len(text.encode(errors="surrogatepass")))
    try:
        config = read_json(text, max_depth=MAX_CONFIG_DEPTH, max_digits=MAX_DIGITS)
    except TextError as error:
        place = f" at line {error.line}, column {error.column}" if error.line else ""
        way_out = " Paste the whole file, from { to }." if "not valid JSON" in str(error) else ""
        raise forms.ValidationError(f"{error.of_file('config.json')}{place}.{way_out}") from error
    if not isinstance(config, dict):
        raise forms.ValidationError(
            "config.json is not a JSON object. Paste the whole file, from { to }."
        )
    return config


def _too_long(size_bytes: int) -> forms.ValidationError:
    """Return the error for a text over the limit, with its size rounded up to KiB."""
    return forms.ValidationError(
        f"The file has {-(-size_bytes // 1024):,} KiB; a config.json has at most "
        f"{MAX_CONFIG_BYTES // 1024} KiB. Paste config.json, not the weights' index."
    )


def read_upload(upload: UploadedFile[Any] | None) -> dict[str, Any]:
    """Return the object in an uploaded ``config.json``, or {} without an upload."""
    if upload is None:
        return {}
    if upload.size and upload.size > MAX_CONFIG_BYTES:
        raise _too_long(upload.size)
    try:
        text = read_text(upload.read(MAX_CONFIG_BYTES + 1))
    except TextError as error:
        raise forms.ValidationError(
            f"This file is not text: {error}. Upload config.json, not the weights."
        ) from error
    return parse_config(text)


@cache
def device_choices() -> tuple[tuple[str, list[tuple[str, str]]], ...]:
    """Return every catalog device with each memory it was sold with, grouped by vendor."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for device in devices_of_every_size():
        label = f"{device.name or device.id} · {gib(device.memory_bytes)} GiB"
        groups.setdefault(device.vendor or "Other", []).append((device.id, label))
    return tuple(
        (vendor, sorted(group, key=lambda pair: pair[1])) for vendor, group in groups.items()
    )


@cache
def model_ids() -> tuple[str, ...]:
    """Return every catalog model's id."""
    return tuple(entry.id for entry in list_models())


FINER = (Option, OptionalText)


class FinerGroup(NamedTuple):
    """Related advanced options; the title is empty for the rest of a step's options."""

    title: str
    fields: list[forms.BoundField]


class StepForm(forms.Form):
    """Base form of a wizard step: labels without a colon, fields split into groups."""

    use_required_attribute = False
    data_names: tuple[str, ...] = ()  # fields shown in the separate data section
    finer_titles: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # title -> its advanced options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("label_suffix", "")
        super().__init__(*args, **kwargs)

    @property
    def plain_fields(self) -> list[forms.BoundField]:
        """Return the basic fields of the step."""
        return [each for each in self._own_fields() if not isinstance(each.field, FINER)]

    @property
    def finer_fields(self) -> list[forms.BoundField]:
        """Return the advanced options, which the step shows collapsed."""
        return [each for group in self.finer_groups for each in group.fields]

    @property
    def finer_groups(self) -> list[FinerGroup]:
        """Return the advanced options by title; those without a title come last."""
        rest = {each.name: each for each in self._own_fields() if isinstance(each.field, FINER)}
        titled = [
            FinerGroup(title, [rest.pop(name) for name in names])
            for title, names in self.finer_titles.items()
        ]
        return [*titled, FinerGroup("", list(rest.values()))] if rest else titled

    @property
    def finer_words(self) -> str:
        """Return the labels of the advanced options that are changed or invalid."""
        return listed([str(each.label) for each in self.finer_fields if _is_touched(each)])

    def _own_fields(self) -> list[forms.BoundField]:
        return [each for each in self if each.name not in self.data_names]


def _is_touched(bound: forms.BoundField) -> bool:
    field = bound.field
    is_other = isinstance(field, FINER) and (bound.value() or field.usual) != field.usual
    return is_other or bool(bound.errors)


GOAL_CHOICES = [
    ("serve", "Serve", "Answer requests as they arrive"),
    ("generate", "Generate in batch", "Process a batch of prompts at the highest throughput"),
    ("finetune", "Fine-tune", "Train an existing model on your own text"),
    ("pretrain", "Pre-train", "Train a model from random weights"),
    ("compress", "Compress", "Make the weights smaller and measure the loss of quality"),
]
OBJECTIVES = [
    ("balanced", "Balanced"),
    ("throughput", "Most tokens per second"),
    ("latency", "Shortest wait"),
    ("cost", "Cheapest"),
    ("memory", "Smallest in memory"),
    ("quality", "Best quality"),
    ("energy", "Least energy"),
]
SLOS = [
    ("chat", "Chat: first token within 1 s, then 20 tokens a second"),
    ("code", "Code completion: first token within 0.5 s, then 33 tokens a second"),
    ("none", "No target"),
]
PERCENTILES = [
    ("p95", "p95: 95 of 100 requests"),
    ("p99", "p99: 99 of 100 requests"),
    ("p50", "The median: every second request"),
    ("mean", "The mean of all requests"),
]
SOURCES = ("demo", "catalog", "team", "config", "folder")
DTYPES = ["fp32", "bf16", "fp16", "fp8", "int8", "int4", "nf4", "nvfp4"]


class GoalForm(StepForm):
    """The goal: what the plan is for, and its latency target."""

    goal = forms.ChoiceField(choices=[(key, name) for key, name, _ in GOAL_CHOICES])
    objective = forms.ChoiceField(label="Objective", choices=OBJECTIVES)
    slo = forms.ChoiceField(
        label="Latency target",
        choices=SLOS,
        help_text="For serving. The verdict shows whether the target is met.",
    )
    percentile = forms.ChoiceField(
        label="Latency percentile",
        choices=PERCENTILES,
        required=False,
        help_text="The share of requests that must meet the latency target",
    )

    def clean_percentile(self) -> str:
        """Return the percentile, or the default if it is missing."""
        return str(self.cleaned_data.get("percentile") or DEFAULT_PERCENTILE)


class ModelForm(StepForm):
    """The model: the demo, a catalog entry, a team model, a config or a folder."""

    source = forms.ChoiceField(choices=[(key, key) for key in SOURCES])
    catalog_id = forms.CharField(
        label="Model",
        required=False,
        help_text="Type part of a name; every entry is a published configuration. A quantised "
        "checkpoint of one may be named too, such as Qwen/Qwen3-8B-FP8.",
        widget=forms.TextInput(attrs={"list": "catalog-models", "autocomplete": "off"}),
    )
    team_model = forms.ChoiceField(label="Model of your team", required=False)
    config = ConfigJson("config.json", "Paste the file as Hugging Face publishes it.")
    config_file = forms.FileField(
        label="Or upload the file",
        required=False,
        widget=forms.FileInput(attrs={"accept": ".json,application/json"}),
    )
    path = forms.CharField(
        label="Folder on the host",
        required=False,
        max_length=400,
        help_text="With config.json, safetensors and tokenizer.json, below the host's model "
        "folder; the host checks it when the job starts.",
    )
    folder_config = ConfigJson("Its config.json", "The planner needs the model's shape.")

    def __init__(self, *args: Any, team_models: Sequence[TeamModel], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.team_models = list(team_models)
        choices = [(model.pk, model.name) for model in self.team_models]
        self.fields["team_model"] = forms.ChoiceField(
            label="Model of your team", required=False, choices=[("", "Choose one"), *choices]
        )

    def clean(self) -> dict[str, Any]:
        """Check only the fields that the chosen source needs."""
        values = super().clean() or self.cleaned_data
        check = getattr(self, f"_check_{values.get('source')}", None)
        if check:
            check(values)
        values.pop("config_file", None)
        return values

    def _check_catalog(self, values: dict[str, Any]) -> None:
        try:
            values["catalog_id"] = checkpoint_name(values.get("catalog_id") or "")
        except PlannerError as error:
            self.add_error("catalog_id", sentence(error.message))

    def _check_team(self, values: dict[str, Any]) -> None:
        if not values.get("team_model"):
            self.add_error("team_model", "Choose one of your team's models, or another source.")

    def _check_config(self, values: dict[str, Any]) -> None:
        try:
            values["config"] = read_upload(values.get("config_file")) or values.get("config")
        except forms.ValidationError as error:
            self.add_error("config_file", error)
            return
        self._check_shape("config", values)

    def _check_folder(self, values: dict[str, Any]) -> None:
        path = values.get("path") or ""
        if not path.strip():
            self.add_error("path", "Name the folder on the host, for example llama-3.2-1b.")
        elif ".." in path.split("/") or "\x00" in path:
            self.add_error("path", "A folder's path may not contain “..”.")
        self._check_shape("folder_config", values)

    def _check_shape(self, name: str, values: dict[str, Any]) -> None:
        if name in self.errors:
            return
        if not values.get(name):
            self.add_error(name, "Paste the content of config.json, or upload the file.")
            return
        try:
            model_from_config(values[name])
        except PlannerError as error:
            self.add_error(name, sentence(error.message))


class HardwareForm(StepForm):
    """The hardware: one of the team's hosts or pools, or catalog hardware."""

    choice = forms.ChoiceField()
    on_lost_rank = forms.ChoiceField(
        label="After the loss of a rank or host",
        choices=[
            ("stop", "Stop the job"),
            ("restart", "Restart all ranks"),
            ("shrink", "Continue on the remaining hosts"),
        ],
        required=False,
        help_text="A training starts again, three times at most, or goes on from its last "
        "checkpoint; of a generation with pipeline stages that goes on, another host takes the "
        "lost one's layers.",
    )
    device = forms.ChoiceField(label="Device", choices=device_choices)
    devices_per_node = WholeNumber("Devices in one machine", 1, 1024)
    nodes = WholeNumber("Machines", 1, 10_000)
    engine = forms.ChoiceField(label="Engine", required=False)
    memory_limit_gib = DecimalNumber(
        "Memory limit",
        0.01,
        1_000_000,
        "GiB of each device; empty means all memory",
        required=False,
    )

    def __init__(
        self,
        *args: Any,
        hosts: Sequence[Host],
        pools: Sequence[Pool] = (),
        engines: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if engines:
            self.fields["engine"] = forms.ChoiceField(
                label="Engine",
                required=False,
                choices=[("", "Automatic"), *engines.items()],
                help_text="Automatic: what Slipway starts on a host; else the usual one",
            )
        else:
            del self.fields["engine"]
        choices = [(f"host:{host.pk}", host.name) for host in hosts]
        choices += [(f"pool:{pool.pk}", pool.name) for pool in pools]
        self.fields["choice"] = forms.ChoiceField(choices=[*choices, ("catalog", "catalog")])


def _auto(names: Sequence[str]) -> list[tuple[str, str]]:
    return [("", "Let the planner choose"), *((name, name) for name in names)]


POOLS = ("prefill_devices", "decode_devices")


class PinsForm(StepForm):
    """Parts of the strategy that are fixed for the planner."""

    weight_dtype = forms.ChoiceField(label="Weights", choices=_auto(DTYPES), required=False)
    kv_cache_dtype = forms.ChoiceField(
        label="KV cache", choices=_auto(["bf16", "fp16", "fp8", "int8"]), required=False
    )
    tensor_parallel_size = WholeNumber("Tensor parallel", 1, 1024, required=False)
    pipeline_parallel_size = WholeNumber("Pipeline parallel", 1, 1024, required=False)
    micro_batch_size = WholeNumber("Micro-batch", 1, 100_000, required=False)
    activation_recomputation = forms.ChoiceField(
        label="Recompute activations", choices=_auto(["none", "selective", "full"]), required=False
    )
    prefill_devices = WholeNumber(
        "Prefill devices", 1, 1024, "Set with “Decode devices”: two separate pools", required=False
    )
    decode_devices = WholeNumber(
        "Decode devices", 1, 1024, "The KV cache is transferred between the pools", required=False
    )

    def __init__(self, *args: Any, is_serving: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not is_serving:  # only serving can separate prefill and decode
            for name in POOLS:
                del self.fields[name]

    def clean(self) -> dict[str, Any]:
        """Return the pins, with the two device pools as ``disaggregated``: both or none."""
        values = super().clean() or {}
        pools = {name: values.pop(name, None) for name in POOLS}
        missing = [name for name in POOLS if name in self.fields and not pools[name]]
        if len(missing) == 1 and missing[0] not in self.errors:
            self.add_error(
                missing[0],
                "“Prefill devices” and “Decode devices” belong together: give both, or neither.",
            )
        if not self.errors and POOLS[0] in self.fields:
            values["disaggregated"] = None if missing else pools
        return values
