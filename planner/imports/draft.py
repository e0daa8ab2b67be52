"""The draft of a plan request: what a text stated, what was not used and why, what is missing."""

import re
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import Field, ValidationError

from planner.specs.base import BadRequestError, JsonObject, SparseSpec, location_of
from planner.specs.estimate import PlanRequest
from planner.specs.workload import Strategy

Kind = Literal[
    "vllm",
    "sglang",
    "llama_server",
    "tensorrt_llm",
    "torchrun",
    "accelerate",
    "deepspeed",
    "transformers",
    "trl",
    "axolotl",
    "llama_factory",
    "swift",
    "torchtitan",
    "nanogpt",
    "unsloth",
    "ollama",
    "mlx",
    "vllm_bench",
    "sglang_bench",
    "aiperf",
    "vllm_batch",
    "llama_quantize",
    "auto_round",
    "llm_compressor",
    "verl",
    "hf_config",
    "deepspeed_config",
    "accelerate_config",
]
Goal = Literal["serve", "train", "compress", "generate"]
TITLES: dict[Kind, str] = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llama_server": "llama.cpp",
    "tensorrt_llm": "TensorRT-LLM",
    "torchrun": "torchrun",
    "accelerate": "Accelerate",
    "deepspeed": "DeepSpeed",
    "transformers": "the Hugging Face trainer",
    "trl": "TRL",
    "axolotl": "Axolotl",
    "llama_factory": "LLaMA-Factory",
    "swift": "ms-swift",
    "torchtitan": "torchtitan",
    "nanogpt": "nanoGPT",
    "unsloth": "Unsloth",
    "ollama": "Ollama",
    "mlx": "MLX LM",
    "vllm_bench": "vLLM's load test",
    "sglang_bench": "SGLang's load test",
    "aiperf": "AIPerf",
    "vllm_batch": "vLLM's batch runner",
    "llama_quantize": "llama-quantize",
    "auto_round": "AutoRound",
    "llm_compressor": "LLM Compressor",
    "verl": "verl",
    "hf_config": "Hugging Face config.json",
    "deepspeed_config": "DeepSpeed's configuration",
    "accelerate_config": "Accelerate's configuration",
}
# Sizes, counts and tokens beyond these are typing errors, not plans.
LARGEST_COUNT, LARGEST_TOKENS = 65_536, 1_000_000_000
SHOWN_CHARACTERS = 120
NEAREST_SIMILARITY, MOST_NEAREST = 0.6, 20
MOST_SETTINGS = 1000  # of one command or file; the largest tool knows half as many
SECRET = re.compile(r"(api_?key|token|secret|password|credential)s?$", re.IGNORECASE)
NOT_SECRET = re.compile(r"(pad|eos|bos|unk|new|special|max\w*|min\w*|num\w*)_token", re.IGNORECASE)
SUFFIXES = {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2, "g": 1000**3, "G": 1024**3}
TRUE, FALSE = frozenset({"true", "yes", "on", "1"}), frozenset({"false", "no", "off", "0"})


class Item(SparseSpec):
    """One setting of the text: its source, and the request field it became or why it did not.

    ``field`` is the dotted name in the request, ``value`` the value there. ``reason`` states why
    the setting was not used, or what of one that was used the plan leaves out.
    """

    source: str
    field: str | None = None
    value: Any = None
    reason: str | None = None


class Import(SparseSpec):
    """A draft of a plan request read from another tool's settings.

    ``request`` has the fields of a ``PlanRequest`` as far as they are known; ``missing`` lists the
    others that a plan needs. ``data`` names a data set of the Hub, and how TRL packs its rows, by
    the fields of a training's data, and ``rewards`` its reward functions: no request has them.
    ``repository`` has the weights of a catalog model, where the text names another one than its
    own, and ``rope_scaling`` what stretches the model's context, by the names of transformers.
    ``ignored`` settings are known to the tool, with the reason why the plan does not use them;
    ``unknown`` ones are not known to it, with the nearest name as reason. A setting stands in one
    of the three. ``assumptions`` are those of them that change the work, as sentences for the plan
    that is made of the draft.
    """

    kind: Kind
    goal: Goal | None = None
    model: str | dict[str, Any] | None = None
    repository: str | None = None
    rope_scaling: dict[str, Any] | None = None
    data: dict[str, str] = Field(default_factory=dict)
    rewards: tuple[str, ...] = ()
    request: JsonObject = Field(default_factory=dict)
    understood: tuple[Item, ...] = ()
    ignored: tuple[Item, ...] = ()
    unknown: tuple[Item, ...] = ()
    missing: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()


def is_secret(name: str) -> bool:
    """Return whether an option or variable of this name holds a secret, which is not repeated.

    >>> is_secret("--api-key"), is_secret("HF_TOKEN"), is_secret("pad_token")
    (True, True, False)
    """
    slug = name.lstrip("-").replace("-", "_")
    return SECRET.search(slug) is not None and NOT_SECRET.search(slug) is None


def shown(text: object) -> str:
    """Return a value as one short line for a message."""
    line = " ".join(str(text).split())
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[: SHOWN_CHARACTERS - 1]}…"


@dataclass(eq=False)
class BadSettingError(BadRequestError):
    """A setting has no value, or one outside its limit; the rest of the text can be read."""

    source: str = ""
    reason: str = ""


# The sources of settings that an earlier reading of the same text refused (see ``paste``).
REFUSED: ContextVar[frozenset[str]] = ContextVar("REFUSED", default=frozenset())


@dataclass(frozen=True)
class Option:
    """One option of a command line, or one key of a file.

    ``written`` is the name as written, ``value`` None for a switch without a value.
    ``is_variable``: the value is a shell variable, which only a shell could expand.
    """

    name: str
    value: Any
    source: str
    written: str = ""
    is_variable: bool = False

    @property
    def title(self) -> str:
        """Return the name as written, for messages."""
        return self.written or self.name

    @property
    def is_on(self) -> bool:
        """Return whether a switch is on; a switch without a value is.

        Raises:
            BadRequestError: the value is neither true nor false.
        """
        if self.value is None:
            return True
        word = str(self.value).lower()
        if word in TRUE or word in FALSE:
            return word in TRUE
        raise self.refusal("true or false")

    @property
    def text(self) -> str:
        """Return the value as text, empty without one."""
        return "" if self.value is None else str(self.value).strip()

    def whole(self, least: int = 1, most: int = LARGEST_COUNT) -> int:
        """Return the value as a whole number; ``4k`` is 4000 and ``4K`` 4096, as in vLLM.

        Raises:
            BadRequestError: it is no whole number from ``least`` to ``most``.
        """
        match = re.fullmatch(r"([+-]?\d{1,15}(?:\.\d{1,6})?)([kKmMgG]?)", self.text, re.ASCII)
        number = float(match[1]) * SUFFIXES[match[2]] if match else None
        if isinstance(self.value, bool) or number is None or number % 1:
            raise self.refusal(f"a whole number from {least:,} to {most:,}")
        if not least <= number <= most:
            raise self.refusal(f"a whole number from {least:,} to {most:,}")
        return int(number)

    def number(self, least: float, most: float) -> float:
        """Return the value as a number.

        Raises:
            BadRequestError: it is no number from ``least`` to ``most``.
        """
        try:
            number = float(self.text)
        except ValueError:
            raise self.refusal(f"a number from {least:g} to {most:g}") from None
        if isinstance(self.value, bool) or not least <= number <= most:
            raise self.refusal(f"a number from {least:g} to {most:g}")
        return number

    def refusal(self, limit: str) -> BadSettingError:
        """Return the error for a value outside its limit."""
        return BadSettingError(
            f"{self.title} is {shown(self.value)!r}: it must be {limit}; correct it, or leave it "
            "out, and paste the text again",
            self.title,
            self.source,
            f"{shown(self.value)!r} is not used: it must be {limit}",
        )


Options = dict[str, Option]


def refuse_many_settings(number: int) -> None:
    """Refuse a command or a file with more settings than any tool knows.

    Raises:
        BadRequestError: there are too many.
    """
    if number > MOST_SETTINGS:
        raise BadRequestError(
            f"the text has {number:,} settings: at most {MOST_SETTINGS:,} are read; paste the "
            "command or the configuration alone",
            "text",
        )


@dataclass(frozen=True)
class Header:
    """What the comment at the top of a file that Slipway exported states of the plan.

    ``devices`` is their number in all ``servers`` on ``nodes``, which run the same command each.
    """

    source: str
    model: str
    device: str
    devices: int
    servers: int = 1
    nodes: int = 1


@dataclass
class Draft:
    """A draft in the making: readers take options and record what became of each."""

    kind: Kind
    goal: Goal | None = None
    header: Header | None = None
    request: JsonObject = field(default_factory=dict)
    model: str | dict[str, Any] | None = None
    understood: list[Item] = field(default_factory=list)
    ignored: list[Item] = field(default_factory=list)
    unknown: list[Item] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    repository: str | None = None
    rope_scaling: dict[str, Any] | None = None
    data: dict[str, str] = field(default_factory=dict)
    rewards: tuple[str, ...] = ()

    def put(self, source: str, name: str, value: object) -> None:
        """Record that a setting became a field of the request, by its dotted name."""
        self.understood.append(Item(source=source, field=name, value=value))
        place = self.request
        *parents, last = name.split(".")
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value

    def put_data(self, source: str, name: str, value: str) -> None:
        """Record that a setting names a data set, its subset or split, or how it is packed."""
        self.understood.append(Item(source=source, field=f"workload.{name}", value=value))
        self.data[name] = value

    def note_rewards(self, source: str, names: str) -> None:
        """Record that a setting names reward functions, which no request has."""
        self.understood.append(Item(source=source, field="workload.reward_function", value=names))

    def ignore(self, source: str, reason: str) -> None:
        """Record that a setting of the tool does not become part of the request, and why."""
        self.ignored.append(Item(source=source, reason=reason))

    def assume(self, source: str, reason: str) -> None:
        """Record a setting that is not used though it changes the work: the plan says so too."""
        self.ignore(source, reason)
        self.assumptions.append(f"{source}: {reason}")

    def variable(self, name: str) -> Option | None:
        """Remove and return an environment variable of the command that a tool reads."""
        if name not in self.variables:
            return None
        value = self.variables.pop(name)
        option = Option(name, value, shown(f"{name}={value}"), name, "$" in value)
        if option.source in REFUSED.get():
            return None
        return self.take({name: option}, name)

    def reject(self, source: str, name: str, known: Iterable[str], title: str = "") -> None:
        """Record that a name is no setting of the tool, with the nearest one.

        ``title`` is the part of the tool that reads it, such as the trainer behind a launcher.
        """
        slug = name.replace("-", "_").lower()[:SHOWN_CHARACTERS]
        nearest = (
            get_close_matches(slug, sorted(known), n=1, cutoff=NEAREST_SIMILARITY)
            if len(self.unknown) < MOST_NEAREST
            else []
        )
        is_option = source.startswith("-")
        named = [f"--{each.replace('_', '-')}" if is_option else each for each in nearest]
        near = f"; nearest: {named[0]}" if named else ""
        title = title or TITLES[self.kind]
        reason = f"{shown(name)} is not a setting of {title}{near}"
        self.unknown.append(Item(source=source, reason=reason))
        if len(self.unknown) <= MOST_NEAREST:
            self.assumptions.append(f"{source}: {reason}, and is not used")

    def need(self, name: str, why: str) -> None:
        """Record that a plan still needs a field."""
        self.missing.append(f"{name}: {why}")

    def value(self, name: str) -> Any:  # noqa: ANN401 - as in JSON
        """Return a field of the request by its dotted name, None if it is not set."""
        place: Any = self.request
        for part in name.split("."):
            place = place.get(part) if isinstance(place, dict) else None
        return place

    def take(self, options: Options, name: str) -> Option | None:
        """Remove and return an option; one whose value is a shell variable is ignored."""
        option = options.pop(name, None)
        if option is not None and option.is_variable:
            self.ignore(option.source, "its value is a shell variable, which is not expanded")
            return None
        return option

    def finish(self) -> Import:
        """Return the draft, with what a plan still needs.

        Raises:
            BadRequestError: the settings contradict each other or a limit of the request.
        """
        if self.header is not None:
            self.put(self.header.source, "cluster.device", self.header.device)
        else:
            self.need("cluster.device", "the device; python -m planner devices lists them")
        if "workload" in self.request:
            self.request["workload"] = {"kind": self.goal, **self.request["workload"]}
        elif self.goal is not None:
            self.request["workload"] = {"kind": self.goal}
        self._check()
        self._state_once()
        return Import(
            kind=self.kind,
            goal=self.goal,
            model=self.model,
            repository=self.repository,
            rope_scaling=self.rope_scaling,
            data=self.data,
            rewards=self.rewards,
            request=self.request,
            understood=tuple(self.understood),
            ignored=tuple(self.ignored),
            unknown=tuple(self.unknown),
            missing=tuple(self.missing),
            assumptions=tuple(dict.fromkeys(self.assumptions)),
        )

    def _state_once(self) -> None:
        """Let each setting stand in one list: what is used in part has the reason beside it."""
        ignored: dict[str, str] = {}
        for item in self.ignored:
            reason = item.reason or ""
            at = next(
                (
                    at
                    for at, each in enumerate(self.understood)
                    if _is_of(item.source, each.source)
                ),
                None,
            )
            if at is not None:
                understood = self.understood[at]
                words = _joined(understood.reason, reason)
                self.understood[at] = understood.model_copy(update={"reason": words})
            else:
                ignored[item.source] = _joined(ignored.get(item.source), reason)
        self.ignored = [Item(source=name, reason=reason) for name, reason in ignored.items()]
        self.unknown = list({item.source: item for item in self.unknown}.values())

    def _check(self) -> None:
        try:
            if self.missing:
                Strategy.model_validate(self.request.get("pins", {}))
            else:
                PlanRequest.model_validate(self.request)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(map(str, location_of(first))) or "request"
            message = str(first["msg"]).removeprefix("Value error, ")
            raise BadRequestError(
                f"{name} is {shown(first['input'])!r}: {message}; correct it and paste the text "
                "again",
                name,
            ) from error


def _joined(before: str | None, reason: str) -> str:
    return "; ".join(dict.fromkeys(each for each in (before, reason) if each))


def _is_of(part: str, whole: str) -> bool:
    """Return whether the source of an item has another setting's source as a part."""
    if part == whole:
        return True
    is_setting = part.startswith("-") or ": " in part
    return is_setting and re.search(rf"(?:^|[ ,]){re.escape(part)}(?:$|[ ,])", whole) is not None


def became(item: Item) -> str:
    """Return what became of a setting: its field of the request, or the reason why it has none."""
    if not item.field:
        return item.reason or ""
    return f"{item.field} = {item.value}" + (f" ({item.reason})" if item.reason else "")


def import_table(imported: Import) -> str:
    """Return a draft as lines of text: what became of each setting, and what is missing."""
    inline = "a model by its config.json" if imported.model else "no model"
    name = imported.model if isinstance(imported.model, str) else inline
    lines = [f"{TITLES[imported.kind]}: {imported.goal or 'no work'}, {name}"]
    sections = (
        ("understood", imported.understood),
        ("not used", imported.ignored),
        ("unknown", imported.unknown),
    )
    for title, items in sections:
        lines += [f"{title}:"] if items else []
        for item in items:
            lines.append(f"  {item.source:44} {became(item)}")
    lines += ["missing:"] if imported.missing else []
    return "\n".join([*lines, *(f"  {each}" for each in imported.missing)]) + "\n"
