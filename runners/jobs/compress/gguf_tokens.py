"""GGUF tokenizer metadata: token list, token types, merges and pre-tokenizer name."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from gguf import GGUFWriter, TokenType
from transformers import PreTrainedTokenizerFast

from runners.jobs.runtime import BadInputError

_SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Pre-tokenizer split pattern -> llama.cpp's name.
PRE_TOKENIZERS = {
    "": "gpt-2",
    _SPLIT_PATTERN % r"\p{N}{1,3}": "llama-bpe",
    _SPLIT_PATTERN % r"\p{N}": "qwen2",
}


class Tokens(NamedTuple):
    """Token names and types by id, the merges, and the pre-tokenizer name."""

    names: Sequence[str]
    kinds: Sequence[TokenType]
    merges: Sequence[str]
    pre: str


def tokens_of(tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> Tokens:
    """Return a byte-level BPE tokenizer's tokens, padded to the model's vocabulary size.

    Raises:
        BadInputError: the tokenizer type or its pre-tokenizer is not supported.
    """
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    pre = _pre_tokenizer_name(document)
    names = [f"[PAD{number}]" for number in range(vocab_size)]
    kinds = [TokenType.UNUSED] * vocab_size
    for name, number in document["model"]["vocab"].items():
        names[number], kinds[number] = name, TokenType.NORMAL
    for added in document.get("added_tokens") or ():
        kind = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        names[added["id"]], kinds[added["id"]] = added["content"], kind
    merges = [
        each if isinstance(each, str) else " ".join(each) for each in document["model"]["merges"]
    ]
    return Tokens(names, kinds, merges, pre)


def write_tokens(writer: GGUFWriter, tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> None:
    """Write the tokenizer metadata to a GGUF file."""
    tokens = tokens_of(tokenizer, vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokens.pre)
    writer.add_token_list(tokens.names)
    writer.add_token_types(tokens.kinds)
    writer.add_token_merges(tokens.merges)
    for number, add in (
        (tokenizer.bos_token_id, writer.add_bos_token_id),
        (tokenizer.eos_token_id, writer.add_eos_token_id),
        (tokenizer.pad_token_id, writer.add_pad_token_id),
    ):
        if number is not None:
            add(number)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
    first = tokenizer("a")["input_ids"][0]
    writer.add_add_bos_token(value=first == tokenizer.bos_token_id)


def _pre_tokenizer_name(document: dict[str, Any]) -> str:
    kind = document["model"]["type"]
    parts = _flat(document.get("pre_tokenizer") or {})
    patterns = [each["pattern"].get("Regex", "?") for each in parts if each["type"] == "Split"]
    is_bytes = any(each["type"] == "ByteLevel" for each in parts)
    name = PRE_TOKENIZERS.get("".join(patterns))
    if kind != "BPE" or not is_bytes or name is None:
        msg = (
            f"its tokenizer is {kind}, which parts text in a way that GGUF has no name for here; "
            "gguf takes byte-level BPE as GPT-2, Llama 3 and Qwen 2 have it"
        )
        raise BadInputError(msg)
    return name


def _flat(part: dict[str, Any]) -> list[dict[str, Any]]:
    return list(part.get("pretokenizers") or ([part] if part else []))
