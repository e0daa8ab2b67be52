"""What engines on GPUs are told alike of a folder: its dtype, its stored format, its template."""

from collections.abc import Collection, Mapping
from pathlib import Path

from runners.jobs.model_files import read_config
from runners.jobs.runtime import BadInputError

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Plain lines, as our own engine reads a conversation whose model has no template.
PLAIN_LINES = str(Path(__file__).with_name("plain_lines.jinja"))


def dtype_flags(weight_dtype: str) -> list[str]:
    """Return in which width it computes."""
    return ["--dtype", DTYPES.get(weight_dtype, "bfloat16")]


def loaded_format(
    title: str,
    config: Mapping[str, object],
    weight_dtype: str,
    stored: Collection[str],
    loaded_as: Mapping[str, str],
) -> list[str]:
    """Return into which format plain weights are made as they are loaded, none for stored ones.

    Raises:
        BadInputError: it does not read the folder's format, or makes no such one of plain weights.
    """
    if _stored_format(title, config, stored) is not None or weight_dtype in DTYPES:
        return []
    if weight_dtype not in loaded_as:
        msg = (
            f"weight_dtype is {weight_dtype}, and {title} makes no {_BITS[weight_dtype]}-bit "
            "weights of plain ones as it loads them; compress the model first, or choose "
            f"{' or '.join(loaded_as)}"
        )
        raise BadInputError(msg)
    return ["--quantization", loaded_as[weight_dtype]]


_BITS = {"int4": 4, "int8": 8, "fp8": 8}


def _stored_format(
    title: str, config: Mapping[str, object], stored: Collection[str]
) -> str | None:
    """Return how a folder's weights are stored, None for plain ones."""
    found = config.get("quantization_config")
    if found is None:
        return None
    method = str(found.get("quant_method")) if isinstance(found, dict) else "?"
    if method not in stored:
        msg = (
            f"config.json: quant_method is {method[:40]}, which {title} does not read; it reads "
            f"{', '.join(sorted(stored))}, or plain safetensors"
        )
        raise BadInputError(msg)
    return method


def template_flags(folder: Path) -> list[str]:
    """Return how a conversation is written, where the model does not say it."""
    config = folder / "tokenizer_config.json"
    has_own = config.exists() and bool(read_config(config).get("chat_template"))
    if has_own or (folder / "chat_template.jinja").exists():
        return []
    return ["--chat-template", PLAIN_LINES]
