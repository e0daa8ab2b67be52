"""A repository's name, once it is read; what its commits, paths and weights are named.

Apart from ``names``, so that a download loads no catalog.
"""

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runners.datasets.repositories import DATA_SETS, STORE_PREFIX

if TYPE_CHECKING:
    from typing import Literal

    from runners.jobspec.base import HubName

COMMIT = re.compile(r"[0-9a-f]{40}")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack")
GGUF = ".gguf"
# Before a repository of another source than the usual one, as people type it.
SCHEMES = {"modelscope": "ms://"}
MODULE = ".py"  # a repository's own code
# What transformers reads classes from; the rest of the JSON files are vocabularies.
CONFIGS = frozenset({
    "config.json", "generation_config.json", "tokenizer_config.json", "preprocessor_config.json",
    "processor_config.json", "video_preprocessor_config.json", "chat_template.json",
})  # fmt: skip
# https://github.com/ggml-org/llama.cpp, tools/gguf-split: %s-%05d-of-%05d.gguf
GGUF_PART = re.compile(r"(?P<stem>.+)-(?P<at>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
LONGEST_PATH = 1024  # characters


@dataclass(frozen=True)
class RepositoryName:
    """A repository, a branch, tag or commit of it, and a GGUF file or type in it ("": none).

    That of a data set begins with ``datasets/``, as in the Hub's addresses.
    """

    repository: str
    revision: str = ""
    file: str = ""
    hub: "HubName | Literal['']" = ""  # "": the usual one of whoever asks

    def __post_init__(self) -> None:
        """Keep paths and addresses made of it within their place, whoever made it.

        Raises:
            ValueError: a part of it would leave its folder.
        """
        if self.repository.removeprefix(DATA_SETS).count("/") != 1 or not is_safe_path(
            self.repository
        ):
            raise ValueError(f"repository is {self.repository!r}: it must be org/name")
        for name, value in (("revision", self.revision), ("file", self.file)):
            if value and not is_safe_path(value):
                raise ValueError(f"{name} is {value!r}: it must be one of the repository's")

    def __str__(self) -> str:
        """Return it as people type it."""
        at = f"@{self.revision}" if self.revision else ""
        file = self.file and (
            f"/{self.file}" if self.file.lower().endswith(GGUF) else f":{self.file}"
        )
        return f"{SCHEMES.get(self.hub, '')}{self.repository}{at}{file}"


def folder_name(repository: str) -> str:
    """Return the name of a repository's folder in the cache, as huggingface_hub has it.

    >>> folder_name("org/name"), folder_name("datasets/org/name")
    ('models--org--name', 'datasets--org--name')
    """
    full = repository if repository.startswith(DATA_SETS) else f"models/{repository}"
    return full.replace("/", "--")


def store_repository(url: str) -> str:
    """Return the name that the cache gives to what lies at an address of an object store.

    >>> store_repository("s3://lab-models/qwen3/v1.2/")
    's3.lab-models/v1-2-5139eac6'
    """
    address = url.rstrip("/")
    bucket = address.removeprefix("s3://").partition("/")[0]
    last = re.sub(r"[^A-Za-z0-9_]+", "-", address.rpartition("/")[2]).strip("-")
    digest = hashlib.sha256(address.encode()).hexdigest()[:8]
    owner = re.sub("-+", "-", bucket)
    return f"{STORE_PREFIX}{owner}/{last[:60].strip('-') or 'root'}-{digest}"


def is_safe_path(path: str) -> bool:
    """Return whether a path of a repository stays in its folder and is no option or git's own."""
    parts = path.split("/")
    return (
        len(path) <= LONGEST_PATH
        and path.isprintable()
        and "\\" not in path
        and all(part not in {"", ".", "..", ".git"} and part[0] not in "- " for part in parts)
    )


def named_code(config: object) -> tuple[str, ...]:
    """Return the classes of Python code that a config names in an auto_map, at any depth of it.

    A processor's config holds those of its parts; of old tokenizers the entry is a list.
    Source: transformers 5, ``auto/tokenization_auto.py`` and ``auto/processing_auto.py``.

    >>> named_code({"image_processor": {"auto_map": {"AutoImageProcessor": "own.Images"}}})
    ('own.Images',)
    """
    if isinstance(config, list):
        return tuple(name for each in config for name in named_code(each))
    if not isinstance(config, dict):
        return ()
    found = [
        _strings(value) if key == "auto_map" else named_code(value)
        for key, value in config.items()
    ]
    return tuple(name for names in found for name in names)


def _strings(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return tuple(text for each in inner for text in _strings(each))
