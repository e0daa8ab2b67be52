"""Read what compresses: llama-quantize and AutoRound by their lines, LLM Compressor by its calls.

A scheme of another tool becomes the method, bits and group size of a compression that a job runs.
One whose format no job writes is refused by name: a plan for another format would be no answer.
"""

import re
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from planner.catalog.gguf_names import GGUF_TYPE, PART, WIDE_TYPES
from planner.imports.documents import read_yaml
from planner.imports.draft import LARGEST_TOKENS, Draft, Option, Options, shown
from planner.imports.models import add_model
from planner.imports.shell import ignore_rest, ignore_words, plain, read_options, source_of
from planner.imports.trainers import paste_file
from planner.specs.base import BadRequestError
from planner.specs.workload import CompressMethod

# The types of GGUF files that a job writes, by their bits.
GGUF_BITS = {"q4_k_m": 4, "q4_k": 4, "q8_0": 8}
WRITTEN = "jobs write Q4_K_M (4 bits) and Q8_0 (8 bits): state one of them in its place"


class Scheme(NamedTuple):
    """What a name of a format stands for: the bits and the group of its weights, and its kind.

    ``kind`` int: whole numbers, weights only; int_dynamic: activations too; fp: 8-bit floats.
    """

    kind: str
    bits: int
    group_size: int | None = None
    note: str = ""


TENSORS = "Slipway's FP8 quantises weights alone: activations stay in 16 bits here"
# Source: neuralmagic/compressed-tensors, quantization/quant_scheme.py, PRESET_SCHEMES;
# intel/auto-round, auto_round/schemes.py, PRESET_SCHEMES and QuantizationScheme's defaults.
SCHEMES = {
    "W2A16": Scheme("int", 2, 128),
    "W2A16G64": Scheme("int", 2, 64),
    "W2A16G32": Scheme("int", 2, 32),
    "W3A16": Scheme("int", 3, 128),
    "W4A16": Scheme("int", 4, 128),
    "W4A16_ASYM": Scheme("int", 4, 128),
    "W8A16": Scheme("int", 8),
    "W8A8": Scheme("int_dynamic", 8),
    "INT8": Scheme("int_dynamic", 8),
    "INT8_W8A8": Scheme("int_dynamic", 8),
    "FPW8A16": Scheme("fp", 8),
    "FP8": Scheme("fp", 8, note=TENSORS),
    "FP8_DYNAMIC": Scheme("fp", 8, note=TENSORS),
    "FP8_BLOCK": Scheme("fp", 8, note=TENSORS),
    "FP8_STATIC": Scheme("fp", 8, note=TENSORS),
}
ROUNDED = "int8_dynamic rounds weights to the nearest: the stated method is left out"
# Methods of whole numbers with chosen bits; others round.
CALIBRATED = WITH_BITS = frozenset({"gptq", "awq", "autoround"})
ROUNDING: dict[int, CompressMethod] = {4: "int4_weight_only", 8: "int8_weight_only"}


def put_scheme(draft: Draft, source: str, name: str, method: str) -> int | None:
    """Record a scheme and a method as those of a compression; return the bits of whole numbers.

    ``method`` is gptq, awq, autoround or round.

    Raises:
        BadRequestError: no job writes the format.
    """
    key = name.strip().upper().replace("-", "_")
    if key.startswith("GGUF:"):
        put_gguf(draft, source, key.removeprefix("GGUF:"))
        return None
    scheme = SCHEMES.get(key)
    if scheme is None:
        raise BadRequestError(
            f"{shown(source)}: no compression of Slipway's writes {shown(name)}; choose one of "
            f"{', '.join(SCHEMES)}, or GGUF:Q4_K_M and GGUF:Q8_0",
            "text",
        )
    if scheme.kind == "fp":
        draft.put(source, "workload.method", "fp8")
        if scheme.note:
            draft.assume(source, scheme.note)
        return None
    if scheme.kind == "int_dynamic":
        draft.put(source, "workload.method", "int8_dynamic")
        if method != "round":
            draft.assume(f"{source} by {method}", ROUNDED)
        return None
    put_whole_numbers(draft, source, method, scheme.bits, scheme.group_size)
    return scheme.bits


def put_whole_numbers(
    draft: Draft, source: str, method: str, bits: int, group_size: int | None
) -> None:
    """Record weights as whole numbers by a method that learns or calibrates, or by rounding.

    Raises:
        BadRequestError: no job writes so many bits by rounding, or at all.
    """
    if bits not in {2, 3, 4, 8}:
        raise BadRequestError(f"{shown(source)}: bits are 2, 3, 4 or 8", "text")
    if method in WITH_BITS:
        draft.put(source, "workload.method", method)
        draft.put(source, "workload.bits", bits)
    elif bits in ROUNDING:
        draft.put(source, "workload.method", ROUNDING[bits])
    else:
        raise BadRequestError(
            f"{shown(source)}: rounding writes 4 or 8 bits; for {bits} choose gptq or autoround",
            "text",
        )
    if group_size is not None and (method in WITH_BITS or bits < 8):  # noqa: PLR2004 - bits
        draft.put(source, "workload.group_size", group_size)


def put_gguf(draft: Draft, source: str, kind: str) -> None:
    """Record a type of GGUF files.

    Raises:
        BadRequestError: a job writes no such files.
    """
    bits = GGUF_BITS.get(kind.lower())
    if bits is None:
        raise BadRequestError(f"{shown(source)}: {WRITTEN}", "text")
    draft.put(source, "workload.method", "gguf")
    draft.put(source, "workload.bits", bits)


# ---------------------------------------------------------------------------
# llama-quantize
# ---------------------------------------------------------------------------


AS_USUAL = "Slipway writes the usual mixture of the type, without it"
OWN_WEIGHTS = "the plan starts from the model's own weights, not from a file of fewer bits"


def read_llama_quantize(draft: Draft, words: list[str]) -> None:
    """Read ``llama-quantize INPUT.gguf [OUTPUT.gguf] TYPE [THREADS]``.

    Source: ggml-org/llama.cpp, tools/quantize/quantize.cpp.

    Raises:
        BadRequestError: the command has no type, or one that no job writes.
    """
    draft.goal = "compress"
    arguments = read_options(draft, words, "llama_quantize")
    options, positional = arguments.options, arguments.positional
    files = [word for word in positional if plain(word).lower().endswith(".gguf")]
    others = [word for word in positional if word not in files]
    if not others:
        raise BadRequestError(
            f"llama-quantize has no type of files: {WRITTEN.partition(': ')[0]}; write one after "
            "the files",
            "text",
        )
    put_gguf(draft, source_of(others[0]), plain(others[0]))
    for word in others[1:]:
        draft.ignore(source_of(word), "no effect on the plan: threads and processes of the host")
    if files:
        _add_source(draft, source_of(files[0]), plain(files[0]))
    else:
        draft.need("model", "the command names no GGUF file")
    for word in files[1:]:
        draft.ignore(source_of(word), "the job names its own result")
    for name in ("allow_requantize", "override_kv", "include_weights", "exclude_weights"):
        option = draft.take(options, name)
        if option is not None:
            draft.ignore(option.source, "without effect on weights that are rounded as they are")
    ignored = {"dry_run", "keep_split", "save_state", "state_file"}
    for name in [each for each in options if each not in ignored]:
        option = draft.take(options, name)
        if option is not None:
            draft.assume(option.source, AS_USUAL)
    ignore_rest(draft, options, "llama_quantize")


def _add_source(draft: Draft, source: str, text: str) -> None:
    """Record the model of a GGUF file to be compressed, by its name or its folder's."""
    stem = PART.sub("", re.sub(r"\.gguf$", "", text, flags=re.IGNORECASE))
    typed = GGUF_TYPE.search(stem)
    base = PurePosixPath((stem[: typed.start()] if typed else stem).replace("\\", "/"))
    if base.name.lower() in {"ggml-model", "model"}:  # of convert_hf_to_gguf.py: in its folder
        base = base.parent
    if typed is not None and typed[1].lower() not in WIDE_TYPES:
        draft.assume(source, OWN_WEIGHTS)
    add_model(draft, source, str(base) if base.is_absolute() else f"./{base}")


# ---------------------------------------------------------------------------
# AutoRound
# ---------------------------------------------------------------------------


class Recipe(NamedTuple):
    """Samples and steps of AutoRound's commands. Source: auto_round/__main__.py, RECIPES."""

    num_samples: int = 128
    steps: int = 200
    length: int = 2048


AUTO_ROUND_RECIPES = {
    "auto-round": Recipe(),
    "auto-round-best": Recipe(512, 1000),
    "auto-round-light": Recipe(128, 50),
}
STEPS = "Slipway learns the rounding in 200 steps"
OTHER_WORK = frozenset({"list", "eval", "help"})


def read_auto_round(draft: Draft, words: list[str], program: str = "auto-round") -> None:
    """Read ``auto-round MODEL --scheme W4A16``, or its recipes ``best`` and ``light``.

    Source: intel/auto-round, auto_round/__main__.py and auto_round/cli.

    Raises:
        BadRequestError: the command does not compress, or to a format that no job writes.
    """
    draft.goal = "compress"
    arguments = read_options(draft, words, "auto_round")
    options, positional = arguments.options, [plain(word) for word in arguments.positional]
    if positional[:1] == ["quantize"]:
        positional = positional[1:]
    if positional[:1] and positional[0] in OTHER_WORK:
        raise BadRequestError(f"'{program} {positional[0]}' compresses nothing", "text")
    named = draft.take(options, "model")
    if named is None and positional:
        named = Option("model", positional[0], source_of(positional[0]))
        positional = positional[1:]
    ignore_words(draft, positional)
    if named is None:
        draft.need("model", "the command names none")
    else:
        add_model(draft, named.source, named.text)
    recipe = AUTO_ROUND_RECIPES.get(program, Recipe())
    method = _auto_round_method(draft, options, recipe)
    _auto_round_scheme(draft, options, method)
    samples, length = draft.take(options, "nsamples"), draft.take(options, "seqlen")
    if method == "round":
        for option in (samples, length):
            if option is not None:
                draft.ignore(option.source, "rounding reads no calibration text")
    elif samples is not None or length is not None or recipe.num_samples != Recipe().num_samples:
        count = samples.whole() if samples else recipe.num_samples
        tokens = length.whole(most=LARGEST_TOKENS) if length else recipe.length
        source = " ".join(each.source for each in (samples, length) if each) or program
        draft.put(source, "workload.calibration_tokens", count * tokens)
    ignore_rest(draft, options, "auto_round")


def _auto_round_method(draft: Draft, options: Options, recipe: Recipe) -> str:
    """Return the method that AutoRound runs: by its algorithm, or rounding without steps."""
    algorithm, steps = draft.take(options, "algorithm"), draft.take(options, "iters")
    text = algorithm.text.lower() if algorithm else "auto_round"
    method = {"auto_round": "autoround", "rtn": "round", "awq": "awq"}.get(text)
    if method is None and algorithm is not None:
        raise algorithm.refusal("auto_round, rtn or awq")
    count = steps.whole(0) if steps else recipe.steps
    if method == "autoround" and count == 0:
        method = "round"
    if algorithm is not None:
        draft.ignore(algorithm.source, f"read with the scheme, as {method}")
    if steps is not None and (method == "round" or count == Recipe().steps):
        draft.ignore(steps.source, "as planned" if count else "0: rounding to the nearest")
    elif steps is not None:
        draft.assume(steps.source, STEPS)
    elif count != Recipe().steps and method == "autoround":
        draft.assume(f"{count} steps of the recipe", STEPS)
    return method or "autoround"


SAME_BITS = "Slipway compresses all layers to the same bits"
WEIGHTS_ONLY = "Slipway's AutoRound writes whole numbers, weights only"
OTHER_FORMATS = {
    "avg_bits": SAME_BITS,
    "options": SAME_BITS,
    "layer_config": SAME_BITS,
    "act_bits": WEIGHTS_ONLY,
    "data_type": WEIGHTS_ONLY,
    "asym": "Slipway rounds to its own grid",
    "quant_lm_head": "Slipway keeps the last layer",
}


def _auto_round_scheme(draft: Draft, options: Options, method: str) -> None:
    """Record the scheme, with the bits and the group that options state in its place."""
    form, scheme = draft.take(options, "format"), draft.take(options, "scheme")
    bits, group = draft.take(options, "bits"), draft.take(options, "group_size")
    formats = [each.strip() for each in form.text.lower().split(",")] if form else []
    gguf = next((each for each in formats if each.startswith("gguf:")), "")
    for name, reason in OTHER_FORMATS.items():
        option = draft.take(options, name)
        if option is not None and option.text.lower() in {"16", "int", "false"}:
            draft.ignore(option.source, "as planned")
        elif option is not None:
            draft.assume(option.source, reason)
    if gguf and form is not None:
        put_scheme(draft, form.source, gguf, method)
        for option in (scheme, bits, group):
            if option is not None:
                draft.ignore(option.source, "the type of the GGUF file decides")
        return
    if form is not None:
        draft.ignore(form.source, "the job writes its own form of packed weights")
    if scheme is None:
        source = "W4A16 (the default)"
        scheme = Option("scheme", "W4A16", source, source)
    found = put_scheme(draft, scheme.source, scheme.text, method)
    if bits is not None:
        size = draft.value("workload.group_size")
        put_whole_numbers(draft, bits.source, method, bits.whole(2, 8), size)
    if group is not None and (found is None or group.text.startswith("-") or group.text == "0"):
        draft.assume(group.source, "Slipway's groups have 8 to 4,096 weights")
    elif group is not None:
        draft.put(group.source, "workload.group_size", group.whole(8, 4096))


# ---------------------------------------------------------------------------
# LLM Compressor
# ---------------------------------------------------------------------------


# Modifiers of a recipe, and the method that they are. Source: vllm-project/llm-compressor,
# examples (2026).
MODIFIERS = {
    "QuantizationModifier": "round",
    "GPTQModifier": "gptq",
    "AWQModifier": "awq",
    "AutoRoundModifier": "autoround",
}
PREPARES = frozenset({"SmoothQuantModifier", "SpinQuantModifier", "QuIPModifier"})
ITS_SAMPLES = 512  # num_calibration_samples of oneshot
SMOOTHED = "Slipway quantises without this preparation of the weights"


def read_modifier(draft: Draft, name: str, source: str, arguments: dict[str, Any]) -> bool:
    """Record a modifier of a recipe; return whether it states the method.

    Raises:
        BadRequestError: it states a scheme that no job writes, or is none that is read.
    """
    if name in PREPARES:
        draft.assume(source, SMOOTHED)
        return False
    method = MODIFIERS.get(name)
    if method is None:
        raise BadRequestError(
            f"{name} of LLM Compressor is none that Slipway has: choose "
            f"{', '.join(MODIFIERS)}, or state a compression of your own",
            "text",
        )
    scheme = arguments.get("scheme")
    if not isinstance(scheme, str):
        raise BadRequestError(
            f'{name} states no scheme by name: write scheme="W4A16" or another of '
            f"{', '.join(SCHEMES)} in its place",
            "text",
        )
    put_scheme(draft, source, scheme, method)
    return True


def modifiers_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the modifiers of a recipe in YAML, with their arguments.

    Raises:
        BadRequestError: the text names a file, or has no modifier.
    """
    if "\n" not in text.strip() and text.strip().endswith((".yaml", ".yml")):
        raise paste_file(text.strip())
    found: list[tuple[str, dict[str, Any]]] = []
    values: list[Any] = list(read_yaml(text))
    while values:
        value = values.pop(0)
        if isinstance(value, list):
            values += value
        elif isinstance(value, dict):
            for name, inner in value.items():
                if str(name).endswith("Modifier"):
                    found.append((str(name), inner if isinstance(inner, dict) else {}))
                else:
                    values.append(inner)
    if not found:
        raise BadRequestError("the recipe of LLM Compressor has no modifier", "text")
    return found
