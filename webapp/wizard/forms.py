"""Forms of the goal, model and hardware steps; see ``workload_forms`` for the workload."""

from collections.abc import Mapping, Sequence
from typing import Any

from django import forms

from planner.catalog.hf_config import model_from_config
from planner.catalog.models import checkpoint_name
from planner.errors import PlannerError
from webapp.core.wording import sentence
from webapp.hosts.models import Host, Pool
from webapp.modelhub.models import TeamModel
from webapp.plans.targets import DEFAULT_PERCENTILE
from webapp.wizard.fields import (
    ConfigJson,
    DecimalNumber,
    StepForm,
    WholeNumber,
    device_choices,
    read_upload,
)

GOAL_CHOICES = [
    ("serve", "Serve it", "Answer people or programs as they come"),
    ("generate", "Generate in batch", "Process a batch of prompts at the highest throughput"),
    ("finetune", "Fine-tune it", "Train an existing model on your own text"),
    ("pretrain", "Pre-train it", "Train a model from nothing"),
    ("compress", "Compress it", "Make the weights smaller and see what it costs in quality"),
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
JUDGED_AT = [
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
    objective = forms.ChoiceField(label="What matters most", choices=OBJECTIVES)
    slo = forms.ChoiceField(
        label="How quick it must feel",
        choices=SLOS,
        help_text="For serving. The verdict shows whether the target is met.",
    )
    percentile = forms.ChoiceField(
        label="Judged at",
        choices=JUDGED_AT,
        required=False,
        help_text="The share of requests that must be as quick",
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
            self.add_error("path", "A folder's path may not climb with “..”.")
        self._check_shape("folder_config", values)

    def _check_shape(self, name: str, values: dict[str, Any]) -> None:
        if name in self.errors:
            return
        if not values.get(name):
            self.add_error(name, "Paste the config.json, or upload it.")
            return
        try:
            model_from_config(values[name])
        except PlannerError as error:
            self.add_error(name, sentence(error.message))


class HardwareForm(StepForm):
    """The hardware: one of the team's hosts or pools, or catalog hardware."""

    choice = forms.ChoiceField()
    on_lost_rank = forms.ChoiceField(
        label="If a rank or a host is lost",
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
        "Fill at most",
        0.01,
        1_000_000,
        "GiB of each device; empty means all of it",
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
        "Prefill devices", 1, 1024, "With the next: two pools", required=False
    )
    decode_devices = WholeNumber(
        "Decode devices", 1, 1024, "Caches travel between them", required=False
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
            self.add_error(missing[0], "Two pools have two sizes: give both, or none.")
        if not self.errors and POOLS[0] in self.fields:
            values["disaggregated"] = None if missing else pools
        return values
