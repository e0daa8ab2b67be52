"""Read training scripts in Python by their syntax, without running them.

The calls of Unsloth, Transformers, PEFT and TRL that state a model, adapters and arguments are
read; a value that is no literal, or a name of one, stays an expression and is not used.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.imports.compression import (
    CALIBRATED,
    ITS_SAMPLES,
    modifiers_of,
    read_modifier,
)
from planner.imports.documents import refuse_wide_numbers
from planner.imports.draft import LARGEST_TOKENS, REFUSED, Draft, Option, Options, is_secret, shown
from planner.imports.models import add_model
from planner.imports.shell import option_table
from planner.imports.torchtitan import read_torchtitan_module
from planner.imports.trainers import PREFERENCE, put_objective, read_hugging_face_options
from planner.imports.training import TrainDraft
from planner.specs.base import BadRequestError

PYTHON_LINE = re.compile(r'(from\s+[\w.]+\s+import\b|import\s+[\w.]+|"""|[!%])')
NOTEBOOK = re.compile(r"^[ \t]*[!%].*$", re.MULTILINE)
LOADERS = frozenset({"from_pretrained"})
ADAPTERS = frozenset({"get_peft_model", "LoraConfig"})
CONFIGS = re.compile(r"^(\w*TrainingArguments|[A-Z]\w*Config|[A-Z]\w*Trainer)$")
QUANTISATION = "BitsAndBytesConfig"
# Arguments of the calls, by the names of transformers' and TRL's command lines.
LOADED = {
    "model_name": "model_name_or_path",
    "pretrained_model_name_or_path": "model_name_or_path",
    "max_seq_length": "max_seq_length",
    "load_in_4bit": "load_in_4bit",
    "load_in_8bit": "load_in_8bit",
    "attn_implementation": "attn_implementation",
    "full_finetuning": "full_finetuning",
}
OF_ADAPTERS = {
    "r": "lora_r",
    "target_modules": "lora_target_modules",
    "use_gradient_checkpointing": "gradient_checkpointing",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
}
EXPRESSION = "an expression of Python, which is not run: state its value in its place"
OBJECT = "no effect on the plan: an object of the script, or how files are loaded"
UNSLOTH_LENGTH = 2048
OF_TRAINERS = {name: name for name in option_table("transformers").names}
OTHER_LOADERS = re.compile(r"Tokenizer|Processor|Config|Dataset")


def read_python_text(draft: Draft, text: str) -> None:
    """Read a script in Python: torchtitan's configuration, or a trainer's calls.

    Raises:
        BadRequestError: it is no Python, or has no call of a known trainer.
    """
    try:
        tree = ast.parse(NOTEBOOK.sub("", text))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadRequestError(
            f"the text is not valid Python: {shown(error)}; correct it, and paste it again", "text"
        ) from error
    try:
        if any(name.startswith("torchtitan") for name in _imported(tree)):
            draft.kind = "torchtitan"
            read_torchtitan_module(draft, tree)
            return
        if any(name.split(".")[0] == "llmcompressor" for name in _imported(tree)):
            _read_oneshot(draft, tree)
            return
        _read_calls(draft, tree)
    except RecursionError as error:
        raise BadRequestError(
            "the Python is nested too deep: paste the calls of the trainer alone", "text"
        ) from error


def _imported(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
        elif isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
    return names


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Return the names that a literal is assigned to once."""
    found: dict[str, Any] = {}
    several: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            several |= {name} if name in found else set()
            try:
                found[name] = ast.literal_eval(node.value)
            except (ValueError, TypeError):
                several.add(name)
    refuse_wide_numbers(list(found.values()))
    return {name: value for name, value in found.items() if name not in several}


def _read_calls(draft: Draft, tree: ast.Module) -> None:
    is_unsloth = any(name.split(".")[0] == "unsloth" for name in _imported(tree))
    draft.kind, draft.goal = "unsloth" if is_unsloth else "transformers", "train"
    script = _Script(draft, _constants(tree))
    for call, name, owner in _calls(tree):
        script.read(call, name, owner)
    if not script.is_read:
        raise BadRequestError(
            "the Python has no call of a trainer that is known: paste a script of Unsloth or TRL "
            "with from_pretrained(…), get_peft_model(…) and SFTConfig(…)",
            "text",
        )
    options = script.options
    full = options.pop("full_finetuning", None)
    if full is not None:
        draft.ignore(full.source, "whether adapters are added says it")
    if is_unsloth:
        is_full = full is not None and full.is_on
        _add_unsloth_defaults(options, is_full=is_full)
    if script.has_adapters:
        options["use_peft"] = Option("use_peft", "true", "adapters are added", "get_peft_model")
    read_hugging_face_options(TrainDraft(draft, {}, world=1, per_node=1), options)


def _add_unsloth_defaults(options: Options, *, is_full: bool) -> None:
    if not is_full and not {"load_in_4bit", "load_in_8bit"} & options.keys():
        source = "load_in_4bit=True (Unsloth's default)"
        options["load_in_4bit"] = Option("load_in_4bit", "true", source)
    if not {"max_seq_length", "max_length"} & options.keys():
        source = f"max_seq_length={UNSLOTH_LENGTH} (Unsloth's default)"
        options["max_seq_length"] = Option("max_seq_length", UNSLOTH_LENGTH, source)


@dataclass
class _Script:
    """The arguments of a script's calls in reading, by the names of command lines."""

    draft: Draft
    constants: dict[str, Any]
    options: Options = field(default_factory=dict)
    has_adapters: bool = False
    is_read: bool = False

    def read(self, call: ast.Call, name: str, owner: str) -> None:
        """Take the arguments of a call that a plan depends on; others are none of its."""
        if name in LOADERS and not OTHER_LOADERS.search(owner):
            self.is_read = True
            self._take(call, owner or name, LOADED)
        elif name == QUANTISATION:
            self._take(call, name, LOADED)
        elif name in ADAPTERS:
            self.is_read = self.has_adapters = True
            self._take(call, name, OF_ADAPTERS)
        elif CONFIGS.match(name):
            self.is_read = True
            word = re.sub(r"(Config|Trainer)$", "", name).lower()
            if word in PREFERENCE:
                put_objective(self.draft, name, PREFERENCE[word])
            self._take(call, name, OF_TRAINERS)

    def _take(self, call: ast.Call, title: str, names: Mapping[str, str]) -> None:
        """Take the arguments of a call as options; of two for one setting the first counts."""
        pairs = [(keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg]
        if call.args and "model_name" in names:
            pairs.insert(0, ("model_name", call.args[0]))
        for name, node in pairs:
            if isinstance(node, ast.Call):
                continue  # it is read as a call of its own
            words = "***" if is_secret(name) else ast.unparse(node)
            source = shown(f"{title}.{name}={words}")
            value, is_literal = _literal(node, self.constants)
            target = names.get(name)
            if source in REFUSED.get():
                continue
            if target is None:
                self.draft.ignore(source, OBJECT)
            elif not is_literal:
                self.draft.ignore(source, EXPRESSION)
            elif value is None:
                self.draft.ignore(source, "None: as without it")
            elif target in self.options:
                self.draft.ignore(source, "another call states it")
            else:
                self.options[target] = Option(target, value, source, f"{title}.{name}")


OF_RECIPE = "the job's own choice: which layers are left out, and how a method is tuned"
OF_CALIBRATION = "no effect on the plan: the data set and its preparation"


def _read_oneshot(draft: Draft, tree: ast.Module) -> None:
    """Read a script of LLM Compressor: the model that it loads, its recipe and its samples.

    Source: vllm-project/llm-compressor, src/llmcompressor/entrypoints/oneshot.py.

    Raises:
        BadRequestError: it states no method, or one whose format no job writes.
    """
    draft.kind, draft.goal = "llm_compressor", "compress"
    script = _Compression(draft, _constants(tree))
    for call, name, owner in _calls(tree):
        script.read(call, name, owner)
    methods = [
        name for name, source, inner in script.recipe if read_modifier(draft, name, source, inner)
    ]
    if not methods:
        raise BadRequestError(
            "the Python of LLM Compressor has no modifier that states a method, such as "
            'AWQModifier(scheme="W4A16"): paste the script with its recipe',
            "text",
        )
    for name in methods[:-1]:
        draft.assume(name, f"Slipway compresses once: by {methods[-1]}")
    if draft.value("model") is None and draft.model is None:
        draft.need("model", "the script names none by a literal")
    _add_samples(draft, script.samples)


@dataclass
class _Compression:
    """The calls of a script of LLM Compressor in reading: its recipe's modifiers and samples.

    A modifier has its name, the text that states its scheme, and its arguments.
    """

    draft: Draft
    constants: dict[str, Any]
    recipe: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    samples: Options = field(default_factory=dict)

    def read(self, call: ast.Call, name: str, owner: str) -> None:
        """Take the arguments of a call that a plan depends on; others are none of its."""
        pairs = [(each.arg, each.value) for each in call.keywords if each.arg]
        is_loader = name in LOADERS and not OTHER_LOADERS.search(owner)
        if call.args and (is_loader or name == "oneshot"):
            pairs.insert(0, ("model", call.args[0]))
        stated = {key: _literal(node, self.constants)[0] for key, node in pairs}
        shows = {
            key: shown(f"{name}.{key}={'***' if is_secret(key) else ast.unparse(node)}")
            for key, node in pairs
        }
        model = stated.get("model") or stated.get("pretrained_model_name_or_path")
        is_named = is_loader or name == "oneshot"
        if is_named and isinstance(model, str) and self.draft.value("model") is None:
            add_model(self.draft, shown(f"{name}({model})"), model)
        if name.endswith("Modifier"):
            self.recipe.append((name, shows.get("scheme", name), stated))
            for key in sorted(shows.keys() - {"scheme"}):
                self.draft.ignore(shows[key], OF_RECIPE)
        if name == "oneshot":
            self._take(stated, shows)

    def _take(self, stated: dict[str, Any], shows: dict[str, str]) -> None:
        """Take the recipe and the samples of ``oneshot``."""
        recipe = stated.get("recipe")
        if isinstance(recipe, str):
            self.recipe += [(each, each, inner) for each, inner in modifiers_of(recipe)]
        for key in sorted(shows.keys() - {"model", "recipe"}):
            if shows[key] in REFUSED.get():
                continue
            if key in SAMPLES and stated[key] is not None:
                self.samples[key] = Option(key, stated[key], shows[key], f"oneshot.{key}")
            else:
                self.draft.ignore(shows[key], OF_CALIBRATION)


SAMPLES = ("num_calibration_samples", "max_seq_length")


def _add_samples(draft: Draft, samples: dict[str, Option]) -> None:
    """Record the tokens of calibration, for a method that reads some."""
    count, length = (samples.get(name) for name in SAMPLES)
    source = ", ".join(option.source for option in samples.values())
    if draft.value("workload.method") in CALIBRATED and length is not None:
        number = count.whole() if count else ITS_SAMPLES
        tokens = number * length.whole(most=LARGEST_TOKENS)
        draft.put(source, "workload.calibration_tokens", tokens)
    elif source:
        draft.ignore(
            source, "the method reads no calibration text, or samples of no stated length"
        )


def _calls(tree: ast.Module) -> Iterator[tuple[ast.Call, str, str]]:
    """Yield the calls of a script in its order, with their names and what has the method."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        function = call.func
        if isinstance(function, ast.Attribute):
            owner = function.value.id if isinstance(function.value, ast.Name) else ""
            yield call, function.attr, owner
        elif isinstance(function, ast.Name):
            yield call, function.id, ""


def _literal(node: ast.expr, constants: dict[str, Any]) -> tuple[Any, bool]:
    """Return the value of a literal or of a name of one, and whether it is one."""
    if isinstance(node, ast.Name) and node.id in constants:
        return constants[node.id], True
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        return None, False
    refuse_wide_numbers(value)
    return value, True
