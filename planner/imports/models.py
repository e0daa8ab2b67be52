"""A tool's name of a model, a repository, a path or a GGUF file, as a model of the catalog."""

import re
from pathlib import PurePosixPath

from planner.catalog.format_names import names_gguf
from planner.catalog.gguf import file_type
from planner.catalog.gguf_names import DEFAULT_GGUF_TYPE, GGUF_TYPE, PART, WIDE_TYPES
from planner.catalog.model_names import without_address
from planner.catalog.models import get_model, is_known_model
from planner.imports.draft import Draft, shown
from planner.specs.base import BadRequestError, PlannerError
from planner.specs.model import ModelSpec

# A snapshot in the cache of huggingface_hub: models--owner--name/snapshots/revision.
CACHED = re.compile(r"models--([^/]+?)--([^/]+)")
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", re.ASCII)
LONGEST_NAME = 512
# Folders that hold models, whose name is no owner of one.
FOLDERS = frozenset(
    {"checkpoints", "ckpt", "data", "hub", "huggingface", "llm", "llms", "mnt", "model", "models",
     "tmp", "weights", "workspace"}
)  # fmt: skip
PASTE_CONFIG = "paste its config.json, or choose a model of the catalog"


def known_model(name: object) -> ModelSpec | None:
    """Return the shape of a model of the catalog, None if the catalog does not know the name."""
    if not isinstance(name, str) or not 0 < len(name.strip()) <= LONGEST_NAME:
        return None
    if not is_known_model(name):
        return None
    try:
        return get_model(name)
    except PlannerError:
        return None


def names_of_path(text: str) -> tuple[str, ...]:
    """Return the names of a model that a path may stand for, the most specific first.

    >>> names_of_path("/models/Qwen/Qwen3-8B/")
    ('Qwen/Qwen3-8B', 'Qwen3-8B')
    >>> names_of_path("/models/Qwen3-8B-FP8")
    ('Qwen3-8B-FP8',)
    """
    cached = CACHED.search(text)
    if cached:
        return (f"{cached[1]}/{cached[2]}",)
    parts = [part for part in PurePosixPath(text.replace("\\", "/")).parts if part not in "/.~"]
    has_owner = len(parts) > 1 and parts[-2].lower() not in FOLDERS
    names = ["/".join(parts[-2:])] if has_owner else []
    return (*names, *parts[-1:])


def add_model(draft: Draft, source: str, name: str) -> ModelSpec | None:
    """Record the model that a text names, and return its shape if the catalog has it.

    A repository that the catalog lacks stays in the request by its name; of a path only the name
    of the folder can be looked up.
    """
    text = without_address(name).rstrip("/")
    _refuse_long(text)
    if "$" in text or not text:
        draft.ignore(source, "the model is a shell variable, which is not expanded")
        draft.need("model", f"the text names it by a variable; {PASTE_CONFIG}")
        return None
    is_repository = bool(hub_repository(text))
    candidates = (text,) if is_repository or "/" not in text else names_of_path(text)
    for candidate in candidates:
        spec = known_model(candidate)
        if spec is not None:
            return _put(draft, source, candidate if is_repository else spec.id, spec)
    draft.model = text
    if is_repository:
        draft.put(source, "model", text)
        draft.need("model", f"the catalog has no {shown(text)}; {PASTE_CONFIG}")
    else:
        draft.ignore(source, "a path on another machine, whose name is not a model of the catalog")
        draft.need("model", f"{shown(text)} is not read; {PASTE_CONFIG}")
    return None


def _refuse_long(name: str) -> None:
    if len(name) > LONGEST_NAME:
        raise BadRequestError(
            f"the name of the model has {len(name):,} characters: at most {LONGEST_NAME} are a "
            "name or a path; correct it, and paste the text again",
            "model",
        )


def _put(draft: Draft, source: str, name: str, spec: ModelSpec) -> ModelSpec:
    draft.model = name
    draft.put(source, "model", name)
    return spec


def add_gguf(draft: Draft, source: str, name: str, file: str = "") -> ModelSpec | None:
    """Record the model and the type of a GGUF file or of a repository of such files.

    ``file`` is the one of the repository that the text names apart from it. A repository is kept
    by its name: its files are those to be served.
    """
    text = without_address(name).replace("\\", "/").rstrip("/")
    _refuse_long(text)
    if "$" in text or not text:
        return add_model(draft, source, text)
    repository, _, tag = text.partition(":") if REPOSITORY.fullmatch(text) else (text, "", "")
    stem = PART.sub("", repository.removesuffix(".gguf"))
    typed = GGUF_TYPE.search(stem)
    base = stem[: typed.start()] if typed else stem
    of_file = GGUF_TYPE.search(PART.sub("", file.removesuffix(".gguf")))
    stated = of_file[1] if of_file else tag or (typed[1] if typed else "")
    is_default = not stated
    if is_default and not file and names_gguf(repository):
        stated = DEFAULT_GGUF_TYPE
    base = names_gguf(base) or base
    is_file = repository.endswith(".gguf") or not REPOSITORY.fullmatch(base)
    candidates = names_of_path(base) if is_file else (base,)
    spec = next((known for each in candidates if (known := known_model(each))), None)
    stored = "" if repository.endswith(".gguf") else hub_repository(text)
    stored = f"{repository}/{file}" if stored and file else stored
    if spec is None and stored:
        draft.model = stored
        draft.put(source, "model", stored)
        draft.need("model", f"the catalog has no {shown(stored)}; {PASTE_CONFIG}")
    elif spec is None:
        draft.model = text
        draft.ignore(source, "the name of the file is not a model of the catalog")
        draft.need("model", f"{shown(base)} is not in the catalog; {PASTE_CONFIG}")
    else:
        _put(draft, source, spec.id, spec)
        if stored:
            draft.repository = stored
            draft.ignore(source, f"its files are those of {shown(stored)}")
    put_gguf_type(draft, source, stated.lower(), spec, is_default=is_default)
    return spec


def hub_repository(text: str) -> str:
    """Return a text that has the form of a repository's name, nothing of any other.

    >>> hub_repository("unsloth/Qwen3-8B-GGUF:Q4_K_M"), hub_repository("./Qwen3-8B-GGUF")
    ('unsloth/Qwen3-8B-GGUF:Q4_K_M', '')
    """
    return text if REPOSITORY.fullmatch(text) and text[0] not in ".~" else ""


MXFP4 = "mxfp4"
KEPT_EXPERTS = (
    "its GGUF files keep the experts in MXFP4, as they are published, whatever the others' type"
)


def put_gguf_type(
    draft: Draft, source: str, kind: str, spec: ModelSpec | None, *, is_default: bool = False
) -> None:
    """Record the type of a GGUF file as a pinned format.

    A model that is published in MXFP4 keeps it for its experts, which are nearly all of it.
    Source: ggml-org/llama.cpp#15091 (gpt-oss).
    """
    if spec is not None and spec.weight_dtype == MXFP4:
        draft.put(source, "pins.weight_dtype", MXFP4)
        if not is_default and kind not in {MXFP4, "mxfp4_moe"}:
            draft.ignore(source, KEPT_EXPERTS)
    elif kind in WIDE_TYPES:
        draft.put(source, "pins.weight_dtype", WIDE_TYPES[kind])
    elif kind and (known := file_type(kind)):
        draft.put(source, "pins.quantization", f"gguf:{known}")
    elif kind:
        draft.ignore(source, f"the size of a GGUF file of type {shown(kind)} is not known")
    else:
        draft.need("pins.quantization", "the type of the GGUF file, such as gguf:q4_k_m")
