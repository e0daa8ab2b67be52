"""Start flags that GPU engines share: dtype, quantization format and chat template."""

from collections.abc import Collection, Mapping
from pathlib import Path

from runners.jobs.model_files import read_config
from runners.jobs.runtime import BadInputError

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Plain lines, as Slipway's own engine formats a conversation without a chat template.
PLAIN_LINES = str(Path(__file__).with_name("plain_lines.jinja"))


def dtype_flags(weight_dtype: str) -> list[str]:
    """Return the flags of the compute dtype."""
    return ["--dtype", DTYPES.get(weight_dtype, "bfloat16")]


def loaded_format(
    title: str,
    config: Mapping[str, object],
    weight_dtype: str,
    stored: Collection[str],
    loaded_as: Mapping[str, str],
) -> list[str]:
    """Return the flags that quantise plain weights at load; none for stored formats.

    Raises:
        BadInputError: the engine cannot read the stored format or quantise to this dtype.
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
    """Return the quantization method of stored weights, None for plain ones."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    method = str(quantization.get("quant_method")) if isinstance(quantization, dict) else "?"
    if method not in stored:
        msg = (
            f"config.json: quant_method is {method[:40]}, which {title} does not read; it reads "
            f"{', '.join(sorted(stored))}, or plain safetensors"
        )
        raise BadInputError(msg)
    return method


def template_flags(folder: Path) -> list[str]:
    """Return the chat template flag for a model without a template of its own."""
    config = folder / "tokenizer_config.json"
    has_own = config.exists() and bool(read_config(config).get("chat_template"))
    if has_own or (folder / "chat_template.jinja").exists():
        return []
    return ["--chat-template", PLAIN_LINES]
