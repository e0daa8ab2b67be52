"""Which files of a repository a job reads: weights of one kind, config, tokenizer, template.

Never pickles, code, or a second copy of the weights. The weights are those that
``runners/jobs/model_files.py`` takes for the model of a folder.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import PurePosixPath
from typing import Literal

from runners.datasets.text import MAX_CONFIG_DEPTH, TextError, read_json, read_text
from runners.hub.errors import HubError
from runners.hub.listing import HubFile, Listing, read_file
from runners.hub.repository import CONFIGS, GGUF, GGUF_PART, MODULE, PICKLES, named_code
from runners.hub.settings import HubSettings

Weights = Literal["safetensors", "gguf"]
INDEX, SINGLE, SUFFIX = "model.safetensors.index.json", "model.safetensors", ".safetensors"
MAX_INDEX_BYTES = 64 * 2**20  # 640,000 tensors; Kimi-K2's has 14 MB
MAX_SHARDS = 4096
# What transformers, tokenizers and the engines read beside the weights.
COMPANIONS = frozenset({
    "config.json", "generation_config.json", "quantize_config.json", "quantization_config.json",
    "hf_quant_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "spiece.model", "sentencepiece.bpe.model", "tekken.json", "tiktoken.model", "qwen.tiktoken",
    "chat_template.json", "chat_template.jinja", "preprocessor_config.json",
    "processor_config.json", "video_preprocessor_config.json",
    "modules.json", "1_Pooling/config.json",  # of embedding models, by sentence-transformers
})  # fmt: skip
TEMPLATES = "additional_chat_templates/"  # of transformers, one file a template
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
BESIDE = ("mmproj", "imatrix")  # GGUF files that are no language model
SHARD = re.compile(r"(?P<stem>.+)-(?P<at>\d{5,})-of-(?P<count>\d{5,})\.safetensors")
SHOWN = 12
FOREIGN = "--"  # between another repository and its module, in transformers' auto_map
MAX_CONFIG_BYTES_OF_TOKENIZERS = 16 * 2**20  # as jobs read them
OTHERWISE = "choose a repository whose architecture the engine has itself, or its GGUF files"


def needed_files(
    listing: Listing,
    weights: Weights,
    file: str = "",
    *,
    shards: Sequence[str] = (),
    is_built_in: bool = False,
) -> tuple[HubFile, ...]:
    """Return the files of a repository that a job needs, the small ones first.

    ``file``: of GGUF files the type, such as ``Q4_K_M``, or the path of one or its first part.
    ``shards``: the names in the index (``shard_names``); without them those that are numbered.
    ``is_built_in``: the engine has the architecture itself, and runs it without the repository's
    code.

    Raises:
        HubError: pickle_only, remote_code, ambiguous, unusable, or absent: no such file or type.
    """
    if listing.needs_remote_code and not is_built_in and weights == "safetensors":
        raise HubError("remote_code", f"{_needs_code(listing)}, {_of_whom(listing)}: {OTHERWISE}")
    chosen = _gguf_files(listing, file) if weights == "gguf" else _safetensors(listing, shards)
    beside = (
        each
        for each in listing.files
        if each.path in COMPANIONS
        or (each.path.startswith(TEMPLATES) and each.path.endswith(".jinja"))
    )
    return (*sorted(beside, key=lambda each: each.path), *chosen)


def code_key(listing: Listing) -> str:
    """Return how an administrator names the code of a repository of Hugging Face at a commit."""
    return f"{listing.repository}@{listing.commit}"


def _needs_code(listing: Listing) -> str:
    return f"{listing.shown()} needs code of its own (auto_map in its config.json)"


def _of_whom(listing: Listing) -> str:
    return (
        "which runs only where an administrator of the team has read and allowed it (slipway "
        f"models code allow {code_key(listing)})"
    )


def code_files(
    listing: Listing, settings: HubSettings, trusted: Collection[str]
) -> tuple[HubFile, ...]:
    """Return the modules that a repository which needs code of its own runs: those beside config.

    They are all of its code: the engines run what any of its configs names in auto_map, a
    tokenizer's too, of which every module must be among them.
    ``trusted``: the ``code_key`` of each repository whose code is allowed.

    Raises:
        HubError: remote_code: the code is not allowed, is of a source whose commits fix nothing
            or of another repository, or there is none; unusable: a config is no JSON object; or
            any of ``read_file``.
    """
    if not settings.source.runs_own_code:
        raise HubError(
            "remote_code",
            f"{_needs_code(listing)}, and code runs of the Hugging Face Hub's repositories alone: "
            f"name it there if it has it, or {OTHERWISE}",
        )
    if code_key(listing) not in trusted:
        raise HubError("remote_code", f"{_needs_code(listing)}, {_of_whom(listing)}: {OTHERWISE}")
    for path in sorted(CONFIGS & listing.paths):
        if name := next(
            (each for each in _code_of(path, listing, settings) if FOREIGN in each), ""
        ):
            raise HubError(
                "remote_code",
                f"{listing.shown(path)} names code of another "
                f"repository ({name[:120]}), which no commit fixes and which never runs here: "
                "choose a repository that has its own code, or none",
            )
    found = [each for each in listing.files if "/" not in each.path]
    if not (modules := tuple(each for each in found if each.path.endswith(MODULE))):
        raise HubError(
            "remote_code",
            f"{listing.shown()} is allowed to run code of its own, "
            f"but it has no {MODULE} file beside its config.json: {OTHERWISE}",
        )
    return modules


def _code_of(path: str, listing: Listing, settings: HubSettings) -> tuple[str, ...]:
    """Return the classes that a config of a repository names.

    Raises:
        HubError: unusable, if it is no JSON object; or any of ``read_file``.
    """
    requested = listing.shown(path)
    data = read_file(listing, path, settings, MAX_CONFIG_BYTES_OF_TOKENIZERS)
    try:
        document = read_json(read_text(data), max_depth=MAX_CONFIG_DEPTH, may_be_infinite=True)
    except TextError as error:
        raise HubError(
            "unusable", f"{requested}: {error.of_file(path)}; choose another repository"
        ) from None
    return named_code(document)


def readable_files(listing: Listing) -> tuple[HubFile, ...]:
    """Return every file of a repository that some job may read, the small ones first.

    Of several GGUF models all of them; never pickles or code.
    """
    found = [
        each
        for each in listing.files
        if each.path in COMPANIONS
        or each.path == INDEX
        or each.path.endswith(SUFFIX)
        or each.path.lower().endswith(GGUF)
        or (each.path.startswith(TEMPLATES) and each.path.endswith(".jinja"))
    ]
    is_weight = {each.path: each.path.lower().endswith((SUFFIX, GGUF)) for each in found}
    return tuple(sorted(found, key=lambda each: (is_weight[each.path], each.path)))


def _safetensors(listing: Listing, shards: Sequence[str]) -> list[HubFile]:
    """Return the index, if there is one, and the weights that are a repository's model."""
    where = listing.shown()
    if "config.json" not in listing.paths:
        raise HubError("unusable", f"{where} has no config.json{_instead(listing, 'gguf')}")
    index, single = listing.file(INDEX), listing.file(SINGLE)
    if index is None:
        if single is None:
            raise _no_safetensors(listing)
        return [single]
    names = list(shards) or _numbered(listing) or ([SINGLE] if single else [])
    found = [each for name in names if (each := listing.file(name))]
    if len(found) < len(names) or not names:
        lacking = [name for name in names if listing.file(name) is None]
        raise HubError(
            "unusable",
            f"{where} lacks {some(lacking) or 'every shard'}, which its {INDEX} names: choose "
            "another revision or repository",
        )
    return [index, *found]


def _numbered(listing: Listing) -> list[str]:
    """Return the numbered shards of the model, all of one set; those named ``model`` first."""
    sets: dict[tuple[str, str], list[str]] = {}
    for path in sorted(listing.paths):
        if "/" not in path and (match := SHARD.fullmatch(path)):
            sets.setdefault((match["stem"], match["count"]), []).append(path)
    sets = {key: paths for key, paths in sets.items() if not key[0].startswith("consolidated")}
    if not sets:
        return []
    stem, count = min(sets, key=lambda key: (key[0] != "model", key))
    digits = len(count)
    return [f"{stem}-{at:0{digits}}-of-{count}.safetensors" for at in range(1, int(count) + 1)]


def shard_names(data: bytes, where: str) -> tuple[str, ...]:
    """Return the files that an index of safetensors names, sorted.

    Raises:
        HubError: unusable: it is no such index, or names what is no file beside it.
    """
    try:
        names = set(read_json(read_text(data))["weight_map"].values())
    except (TextError, LookupError, TypeError, AttributeError):
        raise HubError(
            "unusable", f"{where}: {INDEX} has no weight_map: choose another repository"
        ) from None
    for name in names:
        is_plain = isinstance(name, str) and name.isprintable() and "/" not in name
        if not (is_plain and name.endswith(SUFFIX)):
            raise HubError("unusable", f"{where}: {INDEX} names {name!r:.80}, no file beside it")
    if len(names) > MAX_SHARDS:
        raise HubError(
            "unusable", f"{where}: {INDEX} names {len(names):,} files; {MAX_SHARDS:,} are read"
        )
    return tuple(sorted(names))


def exact_files(
    listing: Listing,
    weights: Weights,
    file: str,
    settings: HubSettings,
    *,
    is_built_in: bool = False,
) -> tuple[HubFile, ...]:
    """Return ``needed_files``, with the shards that the repository's own index names.

    Raises:
        HubError: any of ``needed_files`` and ``read_file``.
    """
    shards: tuple[str, ...] = ()
    if weights == "safetensors" and INDEX in listing.paths:
        data = read_file(listing, INDEX, settings, MAX_INDEX_BYTES)
        shards = shard_names(data, listing.shown())
    return needed_files(listing, weights, file, shards=shards, is_built_in=is_built_in)


def adapter_files(listing: Listing) -> tuple[HubFile, ...]:
    """Return the files of an adapter in peft's format.

    Raises:
        HubError: unusable: one of them is not there.
    """
    names = (ADAPTER_CONFIG, ADAPTER)
    if lacking := [name for name in names if name not in listing.paths]:
        raise HubError(
            "unusable",
            f"{listing.shown()} is no adapter in peft's format: it has no {', '.join(lacking)}; "
            "name the prefix of one, as save_pretrained writes it",
        )
    return tuple(each for name in names for each in listing.files if each.path == name)


def _no_safetensors(listing: Listing) -> HubError:
    """Return the error of a repository without safetensors, by what it has instead."""
    where = listing.shown()
    pickles = sorted(path for path in listing.paths if path.endswith(PICKLES) and "/" not in path)
    others = [path for path in listing.paths if path.endswith(SUFFIX) and "/" not in path]
    if ADAPTER in listing.paths:
        return HubError(
            "unusable", f"{where} is an adapter ({ADAPTER}): name its base model's repository"
        )
    if pickles and not others:
        return HubError(
            "pickle_only",
            f"{where} has its weights as pickle only ({some(pickles)}), which can run code and "
            "is never read: choose a repository or a revision with safetensors (the Hub's own "
            "conversions are pull requests, org/name@refs/pr/1), or save the model with "
            "save_pretrained on a machine that you trust and give that folder"
            f"{_instead(listing, 'gguf')}",
        )
    what = f" (it has {some(sorted(others))} without {INDEX})" if others else ""
    return HubError("unusable", f"{where} has no {SINGLE}{what}{_instead(listing, 'gguf')}")


def _instead(listing: Listing, weights: Weights) -> str:
    """Return the way out where a repository has weights of the other kind."""
    has_gguf = any(path.lower().endswith(GGUF) for path in listing.paths)
    if weights == "gguf" and has_gguf:
        return f"; it has GGUF files, which llama.cpp serves: {_offered(_models(listing))}"
    return "; choose another repository"


def _gguf_files(listing: Listing, file: str) -> list[HubFile]:
    """Return the one GGUF model of a repository that ``file`` names: a file, or all its parts."""
    where = listing.shown()
    models = _models(listing)
    if not models:
        raise HubError(
            "unusable",
            f"{where} has no GGUF files: choose a repository that has, often named "
            f"{listing.repository.partition('/')[2]}-GGUF, or an engine that reads safetensors",
        )
    named = _named(models, file)
    if file and not named:
        raise HubError("absent", f"{where} has no GGUF file {file!r}: {_offered(models)}")
    if len(named) > 1:
        raise HubError(
            "ambiguous",
            f"{where} holds {len(named)} GGUF models{f' of {file!r}' if file else ''}: "
            f"{_offered(named)}",
        )
    ((name, files),) = named.items()
    part = GGUF_PART.fullmatch(files[0].path)
    if part is not None and len(files) != int(part["count"]):
        raise HubError(
            "unusable",
            f"{where} has {len(files)} of the {int(part['count'])} parts of {name}: choose "
            "another type or revision",
        )
    return files


def _models(listing: Listing) -> dict[str, list[HubFile]]:
    """Return the GGUF models of a repository by their paths, ``-*`` for the number of a part."""
    models: dict[str, list[HubFile]] = {}
    for each in sorted(listing.files, key=lambda each: each.path):
        name = PurePosixPath(each.path).name.lower()
        if not name.endswith(GGUF) or any(word in name for word in BESIDE):
            continue
        part = GGUF_PART.fullmatch(each.path)
        models.setdefault(f"{part['stem']}-*{GGUF}" if part else each.path, []).append(each)
    return models


def gguf_type(path: str) -> str:
    """Return the type that the path of a GGUF file states, "" if it states none.

    >>> gguf_type("Qwen3-8B-UD-Q4_K_XL.gguf"), gguf_type("Q8_0/model-*.gguf")
    ('UD-Q4_K_XL', 'Q8_0')
    """
    stem = PurePosixPath(path[: -len(GGUF)].removesuffix("-*"))
    for text in (stem.name, *reversed(stem.parts[:-1])):
        if found := _label().search(text):
            return found[1].upper()
    return ""


@cache
def _label() -> re.Pattern[str]:
    """Return what finds a type at the end of a name; only GGUF files need the catalog."""
    from planner.catalog.gguf_names import TYPES

    pattern = rf"(?:^|[-._])((?:UD[-_])?(?:{TYPES})(?:_XL)?)$"
    return re.compile(pattern, re.IGNORECASE | re.ASCII)


def _named(models: Mapping[str, list[HubFile]], file: str) -> dict[str, list[HubFile]]:
    """Return the models that a type or a path may mean; the type as written counts first."""
    if not file:
        return dict(models)
    if file.lower().endswith(GGUF):
        return {
            key: files for key, files in models.items() if any(each.path == file for each in files)
        }
    wanted = _plain(file)
    exact = {key: files for key, files in models.items() if _plain(gguf_type(key)) == wanted}
    inner = {
        key: files
        for key, files in models.items()
        if _plain(gguf_type(key)).removeprefix("UD_").removesuffix("_XL") == wanted
    }
    return exact or inner


def _plain(label: str) -> str:
    return label.upper().replace("-", "_")


def _offered(models: Mapping[str, list[HubFile]]) -> str:
    """Return what may be named after a colon or a slash, with sizes."""
    labels = [gguf_type(key) for key in models]
    rows = [
        f"{label if label and labels.count(label) == 1 else files[0].path} "
        f"({sum(each.size for each in files) / 1e9:.1f} GB)"
        for label, (_, files) in zip(labels, models.items(), strict=True)
    ]
    return f"name one of {some(rows)} after the repository, as org/name:TYPE or org/name/FILE"


def some(names: Sequence[str]) -> str:
    """Return names for a message: the first ones, and how many others there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
