"""Embeddings of texts: how a model's folder has its hidden states pooled, and their computation.

Source: the files ``modules.json`` and ``1_Pooling/config.json`` of the package
sentence-transformers (``sentence_transformers/models/Pooling.py``); Qwen3-Embedding's model card.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from transformers import PreTrainedModel

from runners.jobs.model_files import model_folder, model_roots, open_file
from runners.jobs.runtime import MissingModelError
from runners.jobs.serve.paging import PagedCache, Step, TokenRow
from runners.jobspec import ArtefactModel, FolderModel, ModelRef

MODULES, POOLING = "modules.json", "1_Pooling"
MAX_BYTES = 64 * 1024
Mode = Literal["lasttoken", "mean"]
MODES: tuple[Mode, ...] = ("lasttoken", "mean")
# Names of the modes in files that have a switch for each.
SWITCHES = {
    "pooling_mode_lasttoken": "lasttoken", "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}  # fmt: skip


class Pooling(NamedTuple):
    """How an embedding is made of the hidden states of a text's tokens."""

    mode: Mode
    is_normalised: bool


class UnpooledError(Exception):
    """A model gives no embeddings here; the message says why, and the way out."""


def pooling_of(ref: ModelRef, host_dir: Path, model: PreTrainedModel) -> Pooling:
    """Return how a model's folder has its hidden states pooled.

    Raises:
        UnpooledError: it is no embedding model, or one of a kind that this engine does not have.
    """
    if not isinstance(ref, FolderModel | ArtefactModel):
        raise UnpooledError("the model's weights are random")
    folder, roots = model_folder(ref, host_dir), model_roots(host_dir)
    modules = _json(folder / MODULES, roots)
    if not isinstance(modules, list):
        raise UnpooledError(
            f"the model's folder has no {MODULES}, so that it is no embedding model; serve one, "
            "such as Qwen/Qwen3-Embedding-0.6B"
        )
    kinds = [str(each.get("type", "")).rpartition(".")[2] for each in modules if each]
    others = [each for each in kinds if each not in {"Transformer", "Pooling", "Normalize"}]
    if others or "Pooling" not in kinds:
        what = f"has the module {others[0]}" if others else "has no module Pooling"
        raise UnpooledError(f"its {MODULES} {what}, which this engine does not compute")
    config = _json(folder / POOLING / "config.json", roots)
    modes = _modes(config if isinstance(config, dict) else {})
    mode = next((each for each in MODES if modes == [each]), None)
    if mode is None:
        raise UnpooledError(
            f"its {POOLING}/config.json pools by {', '.join(modes) or 'nothing'}; this engine has "
            f"{' and '.join(MODES)}"
        )
    if getattr(model.config.get_text_config(), "use_bidirectional_attention", None):
        raise UnpooledError("its tokens attend to later ones, and this engine's to earlier ones")
    return Pooling(mode, "Normalize" in kinds)


def _modes(config: dict[str, Any]) -> list[str]:
    if isinstance(found := config.get("pooling_mode"), str):
        return [found]
    return [mode for switch, mode in SWITCHES.items() if config.get(switch)]


def _json(path: Path, roots: Sequence[Path]) -> object:
    """Return what a small file has, None without it or if it is no JSON."""
    try:
        with os.fdopen(open_file(path, roots), "rb") as file:
            return json.loads(file.read(MAX_BYTES))
    except (MissingModelError, OSError, ValueError, RecursionError):
        return None


@torch.inference_mode()
def embedded(
    model: PreTrainedModel,
    cache: PagedCache,
    rows: Sequence[TokenRow],
    pooling: Pooling,
    most: int,
) -> list[list[float]]:
    """Return the embedding [hidden size] of each row, which holds a whole text, in fp32.

    Texts share a pass of at most ``most`` tokens; a longer one is read in several.
    """
    order = sorted(range(len(rows)), key=lambda at: -len(rows[at].tokens))
    found: dict[int, torch.Tensor] = {}
    group: list[int] = []
    for at in order:
        if len(rows[at].tokens) > most:
            found[at] = _pooled_in_pieces(model, cache, rows[at], pooling, most)
            continue
        if group and sum(len(rows[each].tokens) for each in (*group, at)) > most:
            found |= _pooled(model, cache, rows, group, pooling)
            group = []
        group.append(at)
    found |= _pooled(model, cache, rows, group, pooling) if group else {}
    table = torch.stack([found[at] for at in range(len(rows))])
    if pooling.is_normalised:
        table = torch.nn.functional.normalize(table, dim=-1)
    embeddings: list[list[float]] = table.tolist()
    return embeddings


def _pooled(
    model: PreTrainedModel,
    cache: PagedCache,
    rows: Sequence[TokenRow],
    group: Sequence[int],
    pooling: Pooling,
) -> dict[int, torch.Tensor]:
    """Return the pooled states [hidden size] of the rows of one pass."""
    states = hidden_states(model, cache, [rows[at] for at in group])
    parts = torch.split(states, [len(rows[at].tokens) for at in group])
    return {
        at: part[-1] if pooling.mode == "lasttoken" else part.mean(dim=0)
        for at, part in zip(group, parts, strict=True)
    }


def _pooled_in_pieces(
    model: PreTrainedModel, cache: PagedCache, row: TokenRow, pooling: Pooling, most: int
) -> torch.Tensor:
    total, last = torch.zeros(()), torch.zeros(())
    for start in range(0, len(row.tokens), most):
        piece = TokenRow(row.tokens[start : start + most], start, row.pages)
        states = hidden_states(model, cache, [piece])
        total, last = total.to(states.device) + states.sum(dim=0), states[-1]
    return last if pooling.mode == "lasttoken" else total / len(row.tokens)


def hidden_states(
    model: PreTrainedModel, cache: PagedCache, rows: Sequence[TokenRow]
) -> torch.Tensor:
    """Return the last hidden states [tokens, hidden size] of all tokens of the rows, in fp32."""
    device = next(model.parameters()).device
    output = model.base_model(
        input_ids=torch.tensor([[token for row in rows for token in row.tokens]], device=device),
        position_ids=torch.cat([torch.arange(row.start, row.length) for row in rows]).to(device)[
            None
        ],
        use_cache=False,
        step=Step(rows, cache, device),
    )
    states: torch.Tensor = output.last_hidden_state[0].float()
    return states
