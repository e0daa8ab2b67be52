"""Forms of the goal, model and hardware steps, and the form fields of all steps."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_origin

from django import forms
from django.core.files.uploadedfile import UploadedFile
from django.core.validators import BaseValidator
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from planner.catalog.devices import get_device
from planner.catalog.models import checkpoint_name, model_from_config
from planner.catalog.topologies import get_topology, list_topologies
from planner.specs.base import PlannerError
from planner.specs.workload import Strategy
from runners.datasets.text import MAX_CONFIG_DEPTH, TextError, read_json, read_text
from runners.jobspec.base import store_fault
from runners.plans.document import GOALS, HardwareChoice, ModelChoice, PlanDocument, RopeScaling
from runners.plans.fields import Key, Part, Shown, faults_in, limits_of, shown_of
from runners.plans.pins import GOALS_OF, MOST, MOST_OF, PINS, POOLS
from runners.plans.weights import names_weights
from webapp.accounts.models import Team
from webapp.core.display import listed, sentence
from webapp.core.numbers import DecimalField, WholeField
from webapp.hosts.models import Host, Pool
from webapp.modelhub.models import TeamModel
from webapp.plans.repositories import RepositoryProblem, UnreachableError, with_config
from webapp.wizard.combobox import Select, device_choices, device_combobox, model_combobox

# Form fields of the wizard: numbers whose errors state the limits, catalog choices.


MAX_CONFIG_BYTES = 256 * 1024
MAX_DIGITS = 18  # of an integer; no model has a longer one


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
        limits = f"It must be a number from {low:,.12g} to {high:,.12g}."
        self.error_messages |= {"required": f"{label} is missing. {limits}", "invalid": limits}
        _name_limits(self, label, limits, shown="%(show_value).12g")

    def prepare_value(self, value: object) -> object:
        """Return the value to show: a whole number without a decimal point."""
        return int(value) if isinstance(value, float) and value.is_integer() else value


class Choice(forms.TypedChoiceField):
    """A choice among a field's values; what is not sent is its default."""

    widget = Select

    def __init__(self, label: str, words: Mapping[Key, str], default: Key, hint: str = "") -> None:
        self.values = {_text_of(value): value for value in words}
        super().__init__(
            label=label,
            choices=[(_text_of(value), text) for value, text in words.items()],
            help_text=hint,
            required=False,
            coerce=self._value_of,
            empty_value=default,  # type: ignore[arg-type]
        )

    def leave_out(self, value: str) -> None:
        """Offer all values but one."""
        self.values.pop(value, None)
        own: list[tuple[str, Any]] = list(self.choices)  # type: ignore[arg-type]
        self.choices = [each for each in own if each[0] != value]

    def validate(self, value: Any) -> None:  # noqa: ANN401 -- as Django has it
        """Refuse what is not offered, and name what is."""
        if value and not self.valid_value(value):
            offered = ", ".join(filter(None, self.values)) or "nothing"
            raise forms.ValidationError(
                f"“{self.label}” is {str(value)[:60]}, which is not offered here; choose one of: "
                f"{offered}."
            )

    def _value_of(self, text: str) -> Key:
        return self.values[text]

    def prepare_value(self, value: object) -> object:
        """Return the text that stands for a value in the form."""
        return value if isinstance(value, str) else _text_of(value)  # type: ignore[arg-type]


def _text_of(value: Key) -> str:
    """Return the text that stands for a value in a form; None is the empty choice."""
    if value is None:
        return ""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _name_limits(
    field: forms.Field, label: str, limits: str, shown: str = "%(show_value)s"
) -> None:
    """Make a field's errors state the field, the value and the limits."""
    for validator in field.validators:
        if isinstance(validator, BaseValidator):
            validator.message = f"{label} is {shown}. {limits}"


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


# Form fields made from the fields of a plan document.


def _types_of(info: FieldInfo) -> tuple[Any, ...]:
    """Return the types of a field's values, without None and without limits."""
    if get_origin(info.annotation) is Literal:
        return (Literal,)
    parts = get_args(info.annotation) or (info.annotation,)
    return tuple(each for each in parts if each is not type(None))


def form_field(part: type[Part], name: str) -> forms.Field:
    """Return the form field of a document's field: its words, its limits, its choices.

    Numbers are shown in the unit of ``Shown.factor``; ``FormOfPart`` converts them.
    """
    info = part.model_fields[name]
    shown, default = shown_of(info), info.get_default(call_default_factory=True)
    field = _field_of(info, shown, default)
    if shown.only_for:
        conditions = (f"{name}={','.join(values)}" for name, values in shown.only_for.items())
        field.widget.attrs["data-asked-for"] = " ".join(conditions)
    return field


def _field_of(info: FieldInfo, shown: Shown, default: Any) -> forms.Field:  # noqa: ANN401
    if shown.choices:
        return Choice(shown.title, shown.choices, default, shown.help)
    types = _types_of(info)
    if bool in types:
        return forms.BooleanField(label=shown.title, help_text=shown.help, required=False)
    if int in types or float in types:
        is_required = type(None) not in get_args(info.annotation)
        return _number_field(info, shown, is_whole=int in types, is_required=is_required)
    widget = forms.Textarea(attrs={"rows": 3}) if shown.has_lines else forms.TextInput()
    return forms.CharField(
        label=shown.title,
        help_text=shown.help,
        required=False,
        max_length=_longest(info),
        widget=widget,
    )


def _number_field(
    info: FieldInfo, shown: Shown, *, is_whole: bool, is_required: bool
) -> forms.Field:
    low, high = limits_of(info)
    options: dict[str, Any] = {"required": is_required}
    if is_whole and shown.factor == 1.0:
        return WholeNumber(shown.title, low, high, shown.help, **options)
    low, high = (float(f"{limit / shown.factor:.12g}") for limit in (low, high))
    return DecimalNumber(shown.title, low, high, shown.help, **options)


def _longest(info: FieldInfo) -> int | None:
    found = (getattr(each, "max_length", None) for each in info.metadata)
    return next((each for each in found if each is not None), None)


def to_form(part: Part, name: str) -> Any:  # noqa: ANN401 -- of the field's type
    """Return a value in the unit of its form field."""
    value, factor = getattr(part, name), shown_of(type(part).model_fields[name]).factor
    if factor == 1.0 or value is None:
        return value
    return float(f"{value / factor:.12g}")


def from_form(part: type[Part], name: str, value: Any) -> Any:  # noqa: ANN401 -- of the field's type
    """Return a form's value in the unit of the document's field."""
    info = part.model_fields[name]
    factor = shown_of(info).factor
    if factor == 1.0 or value is None:
        return value
    scaled = float(f"{value * factor:.12g}")
    return round(scaled) if int in _types_of(info) else scaled


class FinerGroup(NamedTuple):
    """Related advanced options; the title is empty for the rest of a step's options."""

    title: str
    fields: list[forms.BoundField]


class StepForm(forms.Form):
    """Base form of a wizard step: labels without a colon."""

    use_required_attribute = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("label_suffix", "")
        super().__init__(*args, **kwargs)


class FormOfPart(StepForm):
    """A form made from a part of a plan document; plain fields, and advanced ones in groups."""

    data_names: tuple[str, ...] = ()  # fields shown in the separate data section
    unshown: ClassVar[frozenset[str]] = frozenset()  # fields that a form shows otherwise, or never

    def __init__(self, data: Any = None, *args: Any, part: Part, **kwargs: Any) -> None:  # noqa: ANN401
        self.part = part
        super().__init__(data, *args, initial=self.initial_of(part), **kwargs)
        for name in type(part).model_fields:
            if name not in self.unshown:
                self.fields[name] = form_field(type(part), name)

    def initial_of(self, part: Part) -> dict[str, Any]:
        """Return the values to show for a part."""
        names = [name for name in type(part).model_fields if name not in self.unshown]
        return {name: to_form(part, name) for name in names}

    def values(self) -> dict[str, Any]:
        """Return the cleaned values as the document's."""
        names = [name for name in self.cleaned_data if name in type(self.part).model_fields]
        return {name: from_form(type(self.part), name, self.cleaned_data[name]) for name in names}

    def field_of_fault(self, name: str) -> str | None:
        """Return the form's field for a field of the document; None for the form as a whole."""
        return name if name in self.fields else None

    def clean(self) -> dict[str, Any]:
        """Check the values together, as the document does."""
        values = super().clean() or self.cleaned_data
        if self.errors:
            return values
        try:
            self.part = type(self.part).model_validate({**self.part.model_dump(), **self.values()})
        except ValidationError as error:
            for fault in faults_in(error):
                self.add_error(self.field_of_fault(fault.field), fault.sentence)
        return values

    @property
    def plain_fields(self) -> list[forms.BoundField]:
        """Return the basic fields of the step."""
        return [each for each in self._own_fields() if self._group(each) is None]

    @property
    def finer_fields(self) -> list[forms.BoundField]:
        """Return the advanced options, which the step shows collapsed."""
        return [each for each in self._own_fields() if self._group(each) is not None]

    @property
    def finer_groups(self) -> list[FinerGroup]:
        """Return the advanced options by title; those without a title come last."""
        groups: dict[str, list[forms.BoundField]] = {}
        for each in self.finer_fields:
            groups.setdefault(self._group(each) or "", []).append(each)
        return [FinerGroup(*each) for each in sorted(groups.items(), key=lambda each: not each[0])]

    @property
    def finer_words(self) -> str:
        """Return the labels of the advanced options that are changed or invalid."""
        return listed([str(each.label) for each in self.finer_fields if self._is_touched(each)])

    def _own_fields(self) -> Iterator[forms.BoundField]:
        return (each for each in self if each.name not in self.data_names)

    def _group(self, bound: forms.BoundField) -> str | None:
        info = type(self.part).model_fields.get(bound.name)
        return shown_of(info).group if info else None

    def _is_touched(self, bound: forms.BoundField) -> bool:
        default = bound.field.prepare_value(to_form(type(self.part).model_construct(), bound.name))
        return bool(bound.errors) or bound.field.has_changed(default, bound.value())


GOAL_CHOICES = [(goal, *words) for goal, words in GOALS.items()]
SOURCES = ("demo", "catalog", "hub", "team", "config", "folder")
GOAL_FIELDS = ("objective", "latency_target", "percentile")


class GoalForm(StepForm):
    """The goal: what the plan is for, and its latency target."""

    goal = forms.ChoiceField(choices=[(key, name) for key, name, _ in GOAL_CHOICES])
    objective = form_field(PlanDocument, "objective")
    latency_target = form_field(PlanDocument, "latency_target")
    percentile = form_field(PlanDocument, "percentile")


class ModelForm(StepForm):
    """The model: the demo, a catalog entry, a repository, a team model, a config or a folder."""

    source = forms.ChoiceField(choices=[(key, key) for key in SOURCES])
    catalog_id = form_field(ModelChoice, "catalog_id")
    repository = form_field(ModelChoice, "repository")
    team_model = forms.ChoiceField(label="Model of your team", required=False)
    config = ConfigJson("config.json", "Paste the file as Hugging Face publishes it.")
    config_file = forms.FileField(
        label="Or upload the file",
        required=False,
        widget=forms.FileInput(attrs={"accept": ".json,application/json"}),
    )
    path = form_field(ModelChoice, "path")
    folder_config = ConfigJson("Its config.json", "The planner needs the model's shape.")

    def __init__(
        self,
        data: Any = None,  # noqa: ANN401 -- a QueryDict or None, as Django has it
        *args: Any,
        model: ModelChoice,
        team: Team,
        team_models: Sequence[TeamModel],
        **kwargs: Any,
    ) -> None:
        initial = {**model.model_dump(), "folder_config": model.config}
        super().__init__(data, *args, initial=initial, **kwargs)
        self.model, self.team, self.team_models = model, team, list(team_models)
        choices = [(model.pk, model.name) for model in self.team_models]
        self.fields["team_model"] = forms.ChoiceField(
            label="Model of your team",
            required=False,
            choices=[("", "Choose one"), *choices],
        )
        self.fields["catalog_id"].widget = model_combobox()

    def clean(self) -> dict[str, Any]:
        """Check only the fields that the chosen source needs."""
        values = super().clean() or self.cleaned_data
        check = getattr(self, f"_check_{values.get('source')}", None)
        if check:
            check(values)
        return values

    @property
    def chosen(self) -> ModelChoice:
        """Return the model that a valid form names."""
        values = self.cleaned_data
        config = values["folder_config" if values["source"] == "folder" else "config"]
        return ModelChoice(
            source=values["source"],
            catalog_id=values["catalog_id"] or self.model.catalog_id,
            repository=values["repository"] or None,
            revision=values.get("revision"),
            team_model=values["team_model"] or None,
            config=config or None,
            path=values["path"] or None,
            rope_scaling=self._rope_scaling,
        )

    @property
    def _rope_scaling(self) -> RopeScaling | None:
        """Return the scaling that a text or a document stated of the same model."""
        names = ("source", "catalog_id", "repository", "team_model", "path")
        values = self.cleaned_data
        is_same = all(
            (values[each] or None) == (getattr(self.model, each) or None) for each in names
        )
        return self.model.rope_scaling if is_same else None

    def _check_catalog(self, values: dict[str, Any]) -> None:
        typed = values.get("catalog_id") or ""
        try:
            values["catalog_id"] = checkpoint_name(typed)
        except PlannerError as error:
            self.add_error("catalog_id", sentence(error.message))
            return
        is_same = values["catalog_id"] == self.model.catalog_id and self.model.source == CATALOG
        values["repository"] = self.model.repository if is_same else ""
        values["revision"] = self.model.revision if is_same else None
        if names_weights(typed):
            values |= {"repository": typed, "revision": None}

    def _check_hub(self, values: dict[str, Any]) -> None:
        name = (values.get("repository") or "").strip()
        if not name:
            self.add_error("repository", "Name a repository, for example Qwen/Qwen3-0.6B.")
            return
        before = self.model if self.model.repository == name else None
        try:
            found = with_config(
                ModelChoice(
                    source="hub", repository=name, config=before.config if before else None
                ),
                self.team,
            )
        except RepositoryProblem as problem:
            self.add_error("repository", problem.sentence)
        except UnreachableError as error:
            self.add_error(
                "repository",
                f"The Hub was not asked for it: {error} Choose “A config.json” to plan without "
                "its weights.",
            )
        else:
            values |= {"repository": name, "revision": found.revision, "config": found.config}

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
        elif fault := store_fault(path):
            self.add_error("path", sentence(fault))
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


CATALOG = "catalog"


def place_of(hardware: HardwareChoice) -> str:
    """Return the form's choice for a document's hardware."""
    if hardware.host is not None:
        return f"host:{hardware.host}"
    return f"pool:{hardware.pool}" if hardware.pool is not None else CATALOG


class HardwareForm(StepForm):
    """The hardware: one of the team's hosts or pools, or catalog hardware."""

    choice = forms.ChoiceField()
    on_lost_rank = form_field(HardwareChoice, "on_lost_rank")
    device = forms.ChoiceField(label="Device")
    devices_per_node = form_field(HardwareChoice, "devices_per_node")
    nodes = form_field(HardwareChoice, "nodes")
    topology = form_field(HardwareChoice, "topology")
    nvlink_domain_devices = form_field(HardwareChoice, "nvlink_domain_devices")
    nodes_per_pod = form_field(HardwareChoice, "nodes_per_pod")
    oversubscription_ratio = form_field(HardwareChoice, "oversubscription_ratio")
    engine = forms.ChoiceField(label="Engine", required=False)
    memory_limit_gib = form_field(HardwareChoice, "memory_limit_gib")

    def __init__(
        self,
        data: Any = None,  # noqa: ANN401 -- a QueryDict or None, as Django has it
        *args: Any,
        hardware: HardwareChoice,
        hosts: Sequence[Host],
        pools: Sequence[Pool] = (),
        engines: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        initial = {**hardware.model_dump(), "choice": place_of(hardware)}
        super().__init__(data, *args, initial=initial, **kwargs)
        self.hardware = hardware
        if engines:
            self.fields["engine"] = forms.ChoiceField(
                label="Engine",
                required=False,
                choices=[("", "Automatic"), *engines.items()],
                help_text="Automatic: what Slipway starts on a host; else the usual one",
            )
        else:
            del self.fields["engine"]
        self.fields["device"] = forms.ChoiceField(
            label="Device", choices=device_choices(), widget=device_combobox()
        )
        topology = shown_of(HardwareChoice.model_fields["topology"])
        names = {each.id: each.name for each in list_topologies()}
        self.fields["topology"] = forms.ChoiceField(
            label=topology.title,
            required=False,
            choices=[("", "One network, without blocking"), *names.items()],
            help_text="How the machines are joined; the next fields say what it leaves open",
        )
        choices = [(f"host:{host.pk}", host.name) for host in hosts]
        choices += [(f"pool:{pool.pk}", pool.name) for pool in pools]
        self.fields["choice"] = forms.ChoiceField(choices=[*choices, (CATALOG, CATALOG)])

    @property
    def has_topology(self) -> bool:
        """Return whether the topology of catalog hardware is given, or wrong."""
        return any(self[name].value() or self[name].errors for name in HardwareChoice.TOPOLOGY)

    def clean(self) -> dict[str, Any]:
        """Refuse the topology of another device."""
        values = super().clean() or {}
        name, device = values.get("topology"), values.get("device")
        chosen = get_topology(name) if name else None
        if chosen is None or chosen.device in {None, device} or values.get("choice") != CATALOG:
            return values
        joined = get_device(chosen.device).name
        self.add_error(
            "topology",
            f"The topology {chosen.name} is of the device {joined}. Choose that one above, or "
            "another topology.",
        )
        return values

    @property
    def chosen(self) -> HardwareChoice:
        """Return the hardware that a valid form names."""
        kind, _, key = self.cleaned_data["choice"].partition(":")
        place = {"host": None, "pool": None} | ({kind: key} if key else {})
        values = {name: value or None for name, value in self.cleaned_data.items()}
        if key:
            values |= dict.fromkeys(HardwareChoice.TOPOLOGY)
        elif values.get("topology") and values["devices_per_node"] in {None, 1}:
            each = get_topology(str(values["topology"])).devices_per_node
            values["devices_per_node"] = each or values["devices_per_node"]
        names = [name for name in values if name in HardwareChoice.model_fields]
        return self.hardware.with_values(**{name: values[name] for name in names}, **place)


class PinsForm(StepForm):
    """Parts of the strategy that are fixed for the planner."""

    def __init__(
        self,
        data: Any = None,  # noqa: ANN401 -- a QueryDict or None, as Django has it
        *args: Any,
        pins: Strategy,
        goal: str = "serve",
        **kwargs: Any,
    ) -> None:
        stated = pins.model_dump(mode="json", exclude_none=True)
        initial = {**stated, **(stated.get("disaggregated") or {})}
        super().__init__(data, *args, initial=initial, **kwargs)
        self.pins = pins
        for name, shown in PINS.items():
            if goal not in GOALS_OF.get(name, {goal}) and name not in stated:
                continue
            self.fields[name] = (
                Choice(shown.title, shown.choices, None, shown.help)
                if shown.choices
                else WholeNumber(
                    shown.title, 1, MOST_OF.get(name, MOST), shown.help, required=False
                )
            )

    def clean(self) -> dict[str, Any]:
        """Require both pools of disaggregated serving, or none."""
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

    @property
    def chosen(self) -> Strategy:
        """Return the pins of a valid form.

        A suggestion's other pins stay while the weight dtype is the same.
        """
        is_same = self.pins.weight_dtype == (self.cleaned_data.get("weight_dtype") or None)
        kept = self.pins.stated if is_same else {}
        given = {name: value or None for name, value in self.cleaned_data.items()}
        return Strategy.model_validate({**kept, **given})
