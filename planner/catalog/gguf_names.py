"""Names that state a GGUF type: repositories and files of llama.cpp, and tags of Ollama."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from planner.catalog.format_names import names_gguf
from planner.catalog.gguf import file_type
from planner.catalog.model_names import find, without_address
from planner.catalog.models import checkpoint_name, get_model
from planner.specs.base import BadRequestError, read_quantization

PART = re.compile(r"-\d{5}-of-\d{5}$")
TYPES = r"I?Q\d(?:_\w+?)?|TQ\d_0|BF16|F16|F32|MXFP4(?:_MOE)?"
GGUF_TYPE = re.compile(rf"[-._]((?:UD[-_])?(?:{TYPES}))$", re.IGNORECASE | re.ASCII)
TAG = re.compile(rf"(?:.*-(?!UD[-_]))??((?:UD[-_])?(?:{TYPES}|FP16))", re.IGNORECASE | re.ASCII)
WIDE_TYPES = {
    "bf16": "bf16", "f16": "fp16", "fp16": "fp16", "f32": "fp32", "mxfp4": "mxfp4",
    "mxfp4_moe": "mxfp4",
}  # fmt: skip
DEFAULT_GGUF_TYPE = "Q4_K_M"  # llama.cpp, common/arg.cpp: --hf-repo without a type


class ModelName(NamedTuple):
    """A model as engines name it, the pins that its name states, and what was assumed of it."""

    id: str
    pins: Mapping[str, str]
    assumed: str = ""


def read_model_name(name: str) -> ModelName:
    """Return what a name as people write it stands for, with the type of a GGUF file in it.

    Raises:
        UnknownModelError: the catalog has no such name; the message gives the nearest ones.
        BadRequestError: it states a type of GGUF files whose size is not known.

    >>> read_model_name("hf.co/unsloth/Qwen3-8B-GGUF:Q4_K_M")[:2]
    ('Qwen/Qwen3-8B', {'quantization': 'gguf:q4_k_m'})
    """
    text = without_address(name).removesuffix(":latest")
    if find(text) is not None:
        return ModelName(checkpoint_name(text), {})
    rest, kind = split_gguf(text)
    found = next((each for each in _candidates(rest) if find(each) is not None), None)
    if found is None:
        return ModelName(checkpoint_name(text), {})  # refused with the nearest names
    base = checkpoint_name(found) if "/" not in found else _released(found)
    if not kind and get_model(base).weight_dtype == "mxfp4":
        return ModelName(base, {})  # its files keep the experts in their own format
    assumed = f"GGUF type {DEFAULT_GGUF_TYPE}, llama.cpp's own for {text}" if not kind else ""
    kind = (kind or DEFAULT_GGUF_TYPE).lower()
    if kind in WIDE_TYPES:
        return ModelName(base, {"weight_dtype": WIDE_TYPES[kind]}, assumed)
    known = file_type(kind)
    if known is None:
        raise BadRequestError(
            f"{name} states the GGUF type {kind.upper()}, whose size is not known: name another, "
            f"such as {DEFAULT_GGUF_TYPE}, or the model itself, {base}",
            "model",
        )
    return ModelName(base, {"quantization": f"gguf:{known}"}, assumed)


def agreed_pins(name: ModelName, pins: Mapping[str, object], option: str) -> dict[str, str]:
    """Return the pins that a name adds to those given.

    Raises:
        BadRequestError: both state a quantisation, and not the same.
    """
    given = pins.get("quantization")
    stated = name.pins.get("quantization") or name.pins.get("weight_dtype")
    if not stated or given is None or name.assumed:  # what was assumed gives way
        return {} if name.assumed and given is not None else dict(name.pins)
    if read_quantization(str(given)) == read_quantization(stated):
        return {}
    raise BadRequestError(
        f"{option} is {given!r}, but the name of the model states {stated}: leave one out, "
        f"or name the model itself, {name.id}",
        option,
    )


def split_gguf(name: str) -> tuple[str, str]:
    """Return the name of the model of a GGUF file or repository or of an Ollama tag, and its type.

    The type is empty where a repository of such files states none; other names are no such ones
    and come back whole, without a type.

    >>> split_gguf("Qwen2.5-7B-Instruct-Q4_K_M.gguf"), split_gguf("llama3.3:70b-instruct-q4_K_M")
    (('Qwen2.5-7B-Instruct', 'Q4_K_M'), ('llama3.3:70b-instruct', 'q4_K_M'))
    """
    repository, colon, tag = name.partition(":")
    typed = TAG.fullmatch(tag) if colon else None
    if colon and typed is None:
        return name, ""
    if typed is not None:
        before = tag[: typed.start(1)].rstrip("-_")
        base = names_gguf(repository) or repository
        return (f"{base}:{before}" if before else base), typed[1]
    is_file = name.lower().endswith(".gguf")
    stem = PART.sub("", name[: -len(".gguf")] if is_file else name)
    if not is_file and (model := names_gguf(stem)) is not None:
        return model, ""
    stated = GGUF_TYPE.search(stem)
    is_narrow = stated is not None and "q" in stated[1].lower()  # X-BF16 is no GGUF file
    if stated is None or not (is_file or is_narrow):
        return stem, ""
    base = stem[: stated.start()]
    return names_gguf(base) or base, stated[1]


def _candidates(text: str) -> tuple[str, ...]:
    """Return the names of a model that a name or a path may stand for, the most specific first."""
    parts = [part for part in text.replace("\\", "/").split("/") if part not in {"", ".", "~"}]
    pair = ("/".join(parts[-2:]),) if len(parts) > 1 else ()
    # Some publishers put the owner before the name: Qwen_Qwen3-8B.
    return (*pair, *parts[-1:], *(part.partition("_")[2] for part in parts[-1:] if "_" in part))


def _released(name: str) -> str:
    """Return the release that a repository of GGUF files was made of."""
    found = find(name)
    assert found is not None  # noqa: S101 (the caller found it)
    return found.known if found.stated is not None else found.repository
