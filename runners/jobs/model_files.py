"""Resolves a spec's model to a complete folder of this host, and opens its files safely.

The one reader of model folders: it alone says which files are the model (``weight_names``).
"""

import atexit
import codecs
import contextlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import islice
from pathlib import Path
from typing import Any

from runners.datasets.text import MAX_CONFIG_DEPTH, TextError, read_json, read_text
from runners.hub.repository import GGUF, GGUF_PART, MODULE, PICKLES
from runners.jobs.runtime import BadInputError, MissingModelError
from runners.jobspec import ArtefactModel, HubModel, StoredModel
from runners.jobspec.engines import serving, titles

DATA_SUFFIXES = frozenset({".json", ".jinja", ".model", ".safetensors", ".txt"})
MAX_FILES = 4096
MAX_CONFIG_BYTES = 1024**2
# Gemma 3's has 1.2 MB: one entry for each added token.
MAX_BYTES_OF = {"tokenizer_config.json": 16 * 1024**2}
MAX_ITEMS = 100_000
MAX_SIZE = 2**31  # larger values are only meant to break a reader
# Fields that are loop counts: a reader creates one object for each.
MAX_COUNTS = {
    "num_hidden_layers": 2048, "num_layers": 2048, "n_layer": 2048, "n_layers": 2048,
    "num_experts": 4096, "num_local_experts": 4096, "n_routed_experts": 4096,
    "encoder_layers": 2048, "decoder_layers": 2048,
}  # fmt: skip
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


CODE_FOLDERS_VARIABLE = "SLIPWAY_CODE_FOLDERS"  # of models whose own code is allowed to run
_with_code: set[Path] = set()  # private folders of such models
MODEL_FILES = ("config.json",)  # and the weights: see ``weight_names``
ADAPTER_CONFIG = "adapter_config.json"


def pin_folder(
    folder: Path,
    roots: Sequence[Path],
    owner: int | None = None,
    needed: Sequence[str] = MODEL_FILES,
) -> Path:
    """Return a private folder with links to the opened files of a model or adapter folder.

    The links use the reader's own handles, so that forked ranks have them too; with ``owner``,
    this process's pid, a child that inherits no handles can also read them. Of the safetensors
    files it has the model's own, or those in ``needed``: every library finds the same model.

    Raises:
        MissingModelError: the folder, or a file that it links to, is outside the roots, or a
            file of the weights is missing.
        BadInputError: a file is not a regular file, has a hard link, is not what its name says,
            or the config is invalid.
    """
    place = Path(tempfile.mkdtemp(prefix="slipway-model-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    private = place / folder.name
    private.mkdir()
    if str(folder) in os.environ.get(CODE_FOLDERS_VARIABLE, "").split(os.pathsep):
        _with_code.add(private)
    handle = _open_below(folder, roots)
    try:
        modules = _data_names(handle, frozenset({MODULE})) if runs_code(private) else []
        for name in [*_read_names(folder, handle, roots, needed), *modules]:
            file = _open_file(folder, handle, name, roots)
            if name in LIBRARY_TEXTS or (name == ADAPTER_CONFIG and owner is not None):
                check_text(file, name, str(folder))
            elif name.endswith(SUFFIX):
                check_safetensors(file, name, str(folder))
            (private / name).symlink_to(f"/proc/{owner or 'self'}/fd/{file}")
    finally:
        os.close(handle)
    _complete_index(private / INDEX)
    if (private / "config.json").exists():
        check_config(read_config(private / "config.json"), str(folder))
    return private


def runs_code(private: Path) -> bool:
    """Return whether a folder of ``pin_folder`` is of a model whose own code may run.

    An administrator allowed its repository at its commit (``runners.jobs.fetch``).
    """
    return private in _with_code


def code_flags(private: Path) -> tuple[str, ...]:
    """Return the option by which vLLM and SGLang run the own code of a model, where it may run."""
    return ("--trust-remote-code",) if runs_code(private) else ()


def _complete_index(path: Path) -> None:
    """Give a private folder's index the “metadata” that transformers demands and nobody else."""
    if not path.exists():
        return
    document = _json_of(path.read_bytes(), INDEX)
    if not isinstance(document.get("metadata"), dict):
        path.unlink()
        path.write_text(json.dumps(document | {"metadata": {}}))


def _read_names(
    folder: Path, handle: int, roots: Sequence[Path], needed: Sequence[str]
) -> list[str]:
    """Return the names of the files that jobs read; the weights are the model's own only."""
    names = _data_names(handle)
    if tuple(needed) != MODEL_FILES:
        return [name for name in names if not name.endswith(SUFFIX) or name in needed]

    def read_index() -> bytes:
        with os.fdopen(_open_file(folder, handle, INDEX, roots), "rb") as file:
            return file.read(MAX_INDEX_BYTES + 1)

    # With an adapter's config beside it, transformers would apply that adapter without a word.
    others = {ADAPTER_CONFIG} | {name for name in names if name.endswith(SUFFIX)}
    if {INDEX, SINGLE} & set(names):
        others -= set(weight_names(set(names), read_index, str(folder)))
    return [name for name in names if name not in others]


def _open_below(path: Path, roots: Sequence[Path]) -> int:
    """Return a handle of a folder below a root, opened without following links."""
    root = next((root for root in roots if path.is_relative_to(root)), None)
    if root is None:
        msg = f"{path} is outside of this host's model folders; move it into one of them"
        raise MissingModelError(msg)
    handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in path.relative_to(root).parts:
        try:
            below = os.open(part, _DIRECTORY, dir_fd=handle)
        except OSError as error:
            raise MissingModelError(f"{path} cannot be opened: {error.strerror}") from None
        finally:
            os.close(handle)
        handle = below
    return handle


def _data_names(handle: int, suffixes: Set[str] = DATA_SUFFIXES) -> list[str]:
    with os.scandir(handle) as entries:
        names = [entry.name for entry in entries if Path(entry.name).suffix in suffixes]
    if len(names) > MAX_FILES:
        raise BadInputError(f"the model folder has {len(names)} files; the limit is {MAX_FILES}")
    return sorted(names)


def _open_file(folder: Path, handle: int, name: str, roots: Sequence[Path]) -> int:
    """Return a handle of a regular file; a link is followed once, to a file below a root."""
    try:
        file = os.open(name, _FILE, dir_fd=handle)
    except OSError:
        file = _open_target(folder / name, roots)
    info = os.fstat(file)
    if not stat.S_ISREG(info.st_mode):
        raise BadInputError(f"{folder / name} is not a regular file; copy the model again")
    if info.st_nlink > 1:
        raise BadInputError(
            f"{folder / name} has {info.st_nlink} hard links, and one may be outside of the "
            "model folders; copy the file instead of linking it"
        )
    return file


def open_file(path: Path, roots: Sequence[Path]) -> int:
    """Return a handle of a regular file below a root, opened without following links.

    Raises:
        MissingModelError: the file is outside of the roots, missing, or not a regular file.
    """
    handle = _open_target(path, roots)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise MissingModelError(f"{path} is not a regular file; copy it again")
    return handle


def _open_target(link: Path, roots: Sequence[Path]) -> int:
    target = link.resolve()
    handle = _open_below(target.parent, roots)
    try:
        return os.open(target.name, _FILE, dir_fd=handle)
    except OSError as error:
        raise MissingModelError(f"{link} cannot be opened: {error.strerror}") from None
    finally:
        os.close(handle)


# Which safetensors files of a folder are its model: those that the index names, without an index
# ``model.safetensors``. Other files beside them are never read: a consolidated copy in Mistral's
# own names, an adapter, another precision, or what an earlier download left. Without torch and
# safetensors.


INDEX, SINGLE, SUFFIX = "model.safetensors.index.json", "model.safetensors", ".safetensors"
MAX_INDEX_BYTES = 64 * 2**20  # 640,000 tensors; Kimi-K2's has 14 MB
MAX_NAME_CHARACTERS = 255
SHOWN = 3


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that are a folder's model.

    Raises:
        MissingModelError: there are none, or the index names one that is not there.
        BadInputError: the index is damaged.
    """

    def read_index() -> bytes:
        with (folder / INDEX).open("rb") as file:
            return file.read(MAX_INDEX_BYTES + 1)

    names = weight_names(_names_in(folder), read_index, str(folder))
    return [folder / name for name in names]


def _names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def has_weights(folder: Path) -> bool:
    """Return whether a folder holds a model in safetensors, complete or not."""
    return any(os.path.lexists(folder / name) for name in (INDEX, SINGLE))


def weight_names(names: Set[str], read_index: Callable[[], bytes], where: str) -> list[str]:
    """Return which of a folder's file ``names`` are its model, sorted.

    ``read_index`` returns the index's bytes, or the first ``MAX_INDEX_BYTES`` and more.

    Raises:
        MissingModelError: there are none, or the index names one that is not there.
        BadInputError: the index is damaged, or names what is not a file in the folder.
    """
    if INDEX not in names:
        if SINGLE not in names:
            raise MissingModelError(f"{where} {lacks([SINGLE], names)}")
        return [SINGLE]
    indexed = _indexed(read_index())
    if missing := [name for name in indexed if name not in names]:
        raise MissingModelError(
            f"{where} lacks {some(missing)}, which {INDEX} names ({len(missing)} of "
            f"{len(indexed)} files): the download is incomplete; fetch the missing files, or "
            "download the model again"
        )
    return indexed


def some(names: Sequence[str]) -> str:
    """Return the first names and the number of the remaining ones."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _indexed(data: bytes) -> list[str]:
    if len(data) > MAX_INDEX_BYTES:
        raise BadInputError(f"{INDEX} is longer than {MAX_INDEX_BYTES // 2**20} MiB, the limit")
    if what := disguise(data):
        raise BadInputError(f"{INDEX} {what}")
    document = _json_of(data, INDEX)
    try:
        names = set(document["weight_map"].values())
    except (LookupError, TypeError, AttributeError):
        raise BadInputError(f"{INDEX} has no weight_map; copy the file again") from None
    if len(names) > MAX_FILES:
        raise BadInputError(
            f"{INDEX} names {len(names)} files, and {MAX_FILES} are read; save the model in "
            "larger files"
        )
    for name in names:
        is_short = isinstance(name, str) and len(name) <= MAX_NAME_CHARACTERS
        is_plain = is_short and name.isprintable() and "/" not in name
        if not (is_plain and name.endswith(SUFFIX)):
            raise BadInputError(f"{INDEX} names {name!r:.80}, which is not a file in the folder")
    return sorted(names)


# Files that are not what their names say, found before a library reads them: its error would name
# neither the file nor the way out.


HEAD_BYTES = 64
LENGTH_BYTES = 8  # of the length before a safetensors header
MAX_HEADER_BYTES = 100_000_000  # as in safetensors itself
MAX_PARSED_BYTES = 4 * 2**20  # of larger JSON files both ends are looked at
AGAIN = "download the file again"
GGUF_ENGINES = titles(serving("gguf"), "or")
LFS = b"version https://git-lfs"
DISGUISES = (
    (LFS, f"is a Git LFS pointer; run git lfs pull, or {AGAIN}"),
    (b"PK\x03\x04", "is torch.save's pickle, which is never read; save it with safetensors"),
    (b"\x80", "is pickle, which is never read; save it with safetensors"),
    (b"GGUF", f"is a GGUF file; name it .gguf and serve it with {GGUF_ENGINES}"),
    (b"<", f"is a web page, such as a log-in or an error; {AGAIN}, with access to the model"),
    (b"\x1f\x8b", "is a gzip archive; unpack it"),
)  # fmt: skip
# What transformers and tokenizers read by these names.
LIBRARY_TEXTS = frozenset({
    "config.json", "generation_config.json", INDEX, "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "chat_template.json", "chat_template.jinja",
})  # fmt: skip
# Lists of any text, which tokenizers parse themselves; a token may be half a character.
VOCABULARIES = frozenset({"tokenizer.json", "vocab.json", "added_tokens.json"})


def disguise(head: bytes) -> str:
    """Return what a file is and what to do if its first bytes are of another kind, else ""."""
    if not head:
        return f"is empty; {AGAIN}"
    if head[LENGTH_BYTES : LENGTH_BYTES + 1] == b"{":  # a safetensors length can look like them
        return ""
    start = head.removeprefix(codecs.BOM_UTF8).lstrip()
    return next((what for mark, what in DISGUISES if start.startswith(mark)), "")


def check_safetensors(file: int, name: str, where: str) -> None:
    """Reject an opened file that is not a complete safetensors file.

    Raises:
        BadInputError: it is of another kind or cut off; the message names it and the way out.
    """
    size = os.fstat(file).st_size
    head = os.pread(file, HEAD_BYTES, 0)
    if what := disguise(head):
        raise BadInputError(f"{where}: {name} {what}")
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    has_header = length <= min(size - LENGTH_BYTES, MAX_HEADER_BYTES)
    named = _named_bytes(os.pread(file, length, LENGTH_BYTES)) if has_header else None
    expected = None if named is None else LENGTH_BYTES + length + named
    if expected != size:
        reason = f"{size:,} of {expected:,} bytes" if expected else "it has no header of one"
        raise BadInputError(
            f"{where}: {name} is not a complete safetensors file ({reason}); copy it again"
        )


def _named_bytes(header: bytes) -> int | None:
    """Return the bytes of data that a safetensors header names; None if it is no such header."""
    try:
        entries = read_json(header.decode())  # that has no tensor twice
        ends = [each["data_offsets"][1] for key, each in entries.items() if key != "__metadata__"]
        return int(max(ends, default=0))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        return None


def check_text(file: int, name: str, where: str) -> None:
    """Reject an opened text file that its library would not read, or would read wrongly.

    Raises:
        BadInputError: it has a byte order mark, is not UTF-8 JSON, or is of another kind.
    """
    size = os.fstat(file).st_size
    head = os.pread(file, HEAD_BYTES, 0)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise BadInputError(f"{where}: {name} is UTF-16 text; save it as UTF-8")
    if head.startswith(codecs.BOM_UTF8):
        raise BadInputError(
            f"{where}: {name} begins with a byte order mark, which its readers take for content; "
            "save it as UTF-8 without the mark"
        )
    is_json = name.endswith(".json")  # a template or a vocabulary may begin with any character
    if (is_json or head.startswith(LFS)) and (what := disguise(head)):
        raise BadInputError(f"{where}: {name} {what}")
    if not is_json:
        return
    if name in VOCABULARIES or size > MAX_PARSED_BYTES:
        if not _is_object(file, size):
            raise BadInputError(f"{where}: {name} is not valid JSON, or cut off; {AGAIN}")
        return
    try:
        _json_of(os.pread(file, size, 0), name)
    except BadInputError as error:
        raise BadInputError(f"{where}: {error}") from None


def _is_object(file: int, size: int) -> bool:
    if size > MAX_PARSED_BYTES:
        ends = os.pread(file, HEAD_BYTES, 0), os.pread(file, HEAD_BYTES, size - HEAD_BYTES)
        return ends[0].lstrip().startswith(b"{") and ends[1].rstrip().endswith(b"}")
    try:
        return isinstance(json.loads(os.pread(file, size, 0).decode()), dict)
    except (ValueError, RecursionError):
        return False


# Which GGUF files of a folder are its model: the only one, or all parts of the only split one.
# llama.cpp opens the first part by its name and finds the others beside it.


PROJECTOR, IMPORTANCE = "mmproj", "imatrix"  # in names of what lies beside models


def gguf_files(folder: Path) -> list[Path]:
    """Return the GGUF files that are a folder's model: one, or the parts of one in their order.

    Raises:
        MissingModelError: there is none, or a part is not there.
        BadInputError: there are several models.
    """
    names = _names_in(folder) if folder.is_dir() else set()
    return [folder / name for name in gguf_names(names, str(folder), _inner_gguf(folder))]


def check_gguf(path: Path, name: str) -> None:
    """Reject a file that is not GGUF.

    Raises:
        BadInputError: it is of another kind, such as a Git LFS pointer.
    """
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if not head.startswith(b"GGUF"):
        raise BadInputError(f"{name} {disguise(head) or f'is no GGUF file; {AGAIN}'}")


def gguf_names(names: Set[str], where: str, inner: Path | None = None) -> list[str]:
    """Return which of a folder's file ``names`` are its GGUF model; ``inner``: a folder below.

    Raises:
        MissingModelError: there is none, or a part is not there.
        BadInputError: there are several models.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        is_beside = PROJECTOR in name.lower() or name.lower().startswith(IMPORTANCE)
        if name.endswith(GGUF) and not is_beside:
            part = GGUF_PART.fullmatch(name)
            models.setdefault(
                f"{part['stem']}-*-of-{part['count']}.gguf" if part else name, []
            ).append(name)
    if not models:
        way_out = (
            f"the model is in {inner}: give that folder"
            if inner
            else "compress the model with the method gguf first"
        )
        raise MissingModelError(f"{where} holds no .gguf file; {way_out}")
    if len(models) > 1:
        raise BadInputError(
            f"{where} holds {len(models)} .gguf models ({some(list(models))}); keep one in it, or "
            "give a folder with one"
        )
    (found,) = models.values()
    part = GGUF_PART.fullmatch(found[0])
    if part is None:
        return found
    count = int(part["count"])
    parts = [f"{part['stem']}-{at:05}-of-{count:05}.gguf" for at in range(1, count + 1)]
    if missing := [name for name in parts if name not in names]:
        raise MissingModelError(
            f"{where} lacks {some(missing)}, of a model in {count} parts: the download is "
            "incomplete; fetch the missing files"
        )
    return parts


def _inner_gguf(folder: Path) -> Path | None:
    """Return a folder below with GGUF files, as repositories of several quantisations have."""
    return next((path.parent for path in sorted(islice(folder.glob("*/*.gguf"), MAX_FILES))), None)


# Config parsing with limits


def read_config(path: Path, name: str = "") -> dict[str, Any]:
    """Return the object in a config.json, or another config; ``name``: the file's, if not path's.

    A byte order mark before it is no content.

    Raises:
        BadInputError: the file is too long, nested too deep, or not a JSON object.
    """
    name = name or path.name
    limit = MAX_BYTES_OF.get(name, MAX_CONFIG_BYTES)
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise BadInputError(f"{name} is longer than {limit} bytes, the limit")
    return _json_of(data, name)


def template_text(folder: Path) -> str:
    """Return a model folder's chat template, or all that it names, one after another; "": none.

    Raises:
        BadInputError: tokenizer_config.json is no JSON object.
    """
    if (path := folder / "chat_template.jinja").exists():
        return path.read_bytes()[:MAX_CONFIG_BYTES].decode("utf-8", "replace")
    config = folder / "tokenizer_config.json"
    found = read_config(config).get("chat_template") if config.exists() else None
    if isinstance(found, list):  # of {"name": ..., "template": ...}
        return "\n".join(str(each.get("template")) for each in found if isinstance(each, dict))
    return str(found or "")


def _json_of(data: bytes, name: str) -> dict[str, Any]:
    """Return the object in a JSON file of a model folder.

    Raises:
        BadInputError: it is not a JSON object, or one that is not taken; the message names it.
    """
    try:
        document = read_json(read_text(data), max_depth=MAX_CONFIG_DEPTH, may_be_infinite=True)
    except TextError as error:
        way_out = "" if ";" in str(error) else "; copy it again"
        raise BadInputError(f"{error.of_file(name)}{way_out}") from None
    if not isinstance(document, dict):
        raise BadInputError(f"{name} is not a JSON object; copy it again")
    return document


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Reject implausible sizes before a model is built from them.

    Raises:
        BadInputError: a size exceeds its limit; the message names field, value and limit.
    """
    for number, (name, value) in enumerate(_numbers(config)):
        if number > MAX_ITEMS:
            raise BadInputError(f"{where}: config.json has more than {MAX_ITEMS} values")
        limit = MAX_COUNTS.get(name.rpartition(".")[2], MAX_SIZE)
        if isinstance(value, int) and not -limit <= value <= limit:
            shown = str(value) if abs(value) < 10**30 else "a number of more than 30 digits"
            raise BadInputError(f"{where}: config.json: {name} is {shown}; {limit} is the limit")


def _numbers(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield every value of a document with its dotted name; the depth is already bounded."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, name)
    else:
        yield name, value


# Resolves a spec's model or adapter to a complete folder below this host's roots.
#
# Without torch: engines in other environments use it too.


MODEL_ROOTS_VARIABLE = "SLIPWAY_MODEL_ROOTS"


def model_folder(ref: StoredModel, host_dir: Path, needed: Sequence[str] = MODEL_FILES) -> Path:
    """Return a reference's folder with the ``needed`` files, links resolved.

    Raises:
        MissingModelError: the folder is outside the roots, absent, or incomplete.
    """
    if isinstance(ref, HubModel):  # runners.jobs.fetch puts the folder in its place
        raise MissingModelError(
            f"{ref.repository} was not downloaded; start the job by its host's agent"
        )
    if isinstance(ref, ArtefactModel):
        root = (host_dir / "attempts").resolve()
        folder = (root / ref.attempt_id / "output" / ref.name).resolve()
        _check_inside(folder, [root], "artefact")
    else:
        roots = model_roots(host_dir)
        folder = (roots[0] / ref.path).resolve()  # an absolute path replaces the root
        _check_inside(folder, roots, "folder")
    if not folder.is_dir():
        msg = f"no model folder {folder} on this host; check the path, or copy the model there"
        raise MissingModelError(msg)
    missing = [each for each in needed if not os.path.lexists(folder / each)]
    if tuple(needed) == MODEL_FILES and not has_weights(folder):
        missing.append(SINGLE)
    if missing:
        inner = _inner_model(folder, missing[0])
        raise MissingModelError(f"{folder} {lacks(missing, _names_in(folder), inner)}")
    return folder


ADAPTER_WEIGHTS = "adapter_model.safetensors"
PIPELINE, CONSOLIDATED = "model_index.json", "consolidated"
SHARD = re.compile(r"-\d+-of-\d+\.safetensors$")


def lacks(missing: Sequence[str], names: Set[str], inner: Path | None = None) -> str:
    """Say what a folder lacks, what its other weights are, and the way out.

    ``inner``: the folder below it that has what lacks.
    """
    if PIPELINE in names:
        return f"is a pipeline of diffusers ({PIPELINE}); give the folder of a language model"
    weights = next((name for name in missing if name.endswith(SUFFIX)), "")
    others = {name for name in names if name.endswith(SUFFIX)} - {ADAPTER_WEIGHTS, SINGLE}
    consolidated = {name for name in others if name.startswith(CONSOLIDATED)}
    others -= consolidated
    kinds = (
        ([each for each in names if each.endswith(PICKLES)], "is pickle, which is never read"),
        (
            [each for each in names if each.endswith(".gguf")],
            f"is GGUF, which {GGUF_ENGINES} serves",
        ),
        ({ADAPTER_WEIGHTS} & names, "is an adapter, which does not stand for its base model"),
        (consolidated, "has Mistral's own names: give its config.json and model*.safetensors"),
        ({each for each in others if SHARD.search(each)}, f"is a shard: fetch {INDEX} too"),
        (
            {each for each in others if not SHARD.search(each)},
            f"is not read: name it {weights} if it holds all weights",
        ),
    )
    notes = [f"{some(sorted(found))} {what}" for found, what in kinds if found and weights]
    also = f" ({'; '.join(notes)})" if notes else ""
    way_out = f"the model is in {inner}: give that folder" if inner else ""
    return (
        f"lacks {' and '.join(missing)}{also}; {way_out or 'give a complete Hugging Face folder'}"
    )


def _inner_model(folder: Path, missing: str) -> Path | None:
    """Return the folder below with the missing file: a snapshot of the Hub's cache, or one."""
    found = [
        path
        for pattern in ("snapshots/*", "*")
        for path in sorted(islice(folder.glob(pattern), MAX_FILES))
        if os.path.isfile(path / missing)  # noqa: PTH113 - Path.is_file raises where it may not look
    ]
    with contextlib.suppress(OSError, ValueError):  # the snapshot that the cache calls main
        main = (folder / "refs/main").read_text()[:64].strip()
        found.sort(key=lambda path: path.name != main)
    return next(iter(found), None)


def opened_model(
    ref: StoredModel,
    host_dir: Path,
    needed: Sequence[str] = MODEL_FILES,
    owner: int | None = None,
) -> Path:
    """Return a private folder of a reference's opened model files.

    ``owner``: this process's pid, if a child process reads the folder.

    Raises:
        MissingModelError: the folder is outside the roots, absent, or incomplete.
        BadInputError: a file is not a regular file or not what its name says, or the config is
            invalid.
    """
    roots = [(host_dir / "attempts").resolve(), *model_roots(host_dir)]
    return pin_folder(model_folder(ref, host_dir, needed), roots, owner, needed)


def model_roots(host_dir: Path) -> list[Path]:
    """Return the root folders of models, the host's own first."""
    configured = os.environ.get(MODEL_ROOTS_VARIABLE, "")
    extra = [Path(part) for part in configured.split(os.pathsep) if part]
    return [path.resolve() for path in (host_dir / "models", host_dir / "attempts", *extra)]


def _check_inside(folder: Path, roots: list[Path], what: str) -> None:
    if not any(folder != root and folder.is_relative_to(root) for root in roots):
        allowed = ", ".join(str(root) for root in roots)
        msg = (
            f"model {what} {folder} lies outside {allowed}; move it there, or add its parent "
            f"to {MODEL_ROOTS_VARIABLE} on this host"
        )
        raise MissingModelError(msg)
