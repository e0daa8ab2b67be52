"""LoRA, QLoRA and DoRA adapters with peft: injection, saving in peft's format, merging.

The model is changed in place; only the adapter's matrices require gradients. peft is imported
when an adapter is created, so that other jobs start faster.

Source: Hu et al. 2021, arXiv:2106.09685.
"""

# mypy: disable-error-code="no-untyped-call"
# safetensors has no types.

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from runners.jobs.adapter_config import BASE_KEY, WEIGHTS_NAME
from runners.jobs.memory import tensor_bytes
from runners.jobs.runtime import BadInputError
from runners.jobspec import ArtefactModel, FolderModel
from runners.jobspec.base import LoraOptions

SAMPLE_BYTES = 4096
SAMPLES = 64  # per file: weights of another training differ everywhere


class Lora:
    """A model of which only an adapter is trained."""

    def __init__(
        self,
        model: PreTrainedModel,
        options: LoraOptions,
        original: Callable[[], PreTrainedModel] | None = None,
    ) -> None:
        """Add new matrices to the model, which change nothing until they are trained.

        ``original`` loads the full-width weights for merging if the model's own are quantised:
        merging there would round once more.

        Raises:
            BadInputError: peft is not installed, or does not find such layers.
        """
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError as error:
            msg = "adapters need peft on this host: pip install 'slipway[gpu]'"
            raise BadInputError(msg) from error

        config = LoraConfig(
            r=options.rank,
            lora_alpha=options.alpha,
            lora_dropout=options.dropout,
            target_modules="all-linear" if options.targets == "all" else None,
            task_type="CAUSAL_LM",
            use_dora=options.is_dora,
        )
        self._original = original
        try:
            self._tuned = get_peft_model(model, config)
        except ValueError as error:
            msg = (
                f"lora.targets {options.targets} names no layers of {type(model).__name__}: "
                f"{str(error)[:200]}; choose all"
            )
            raise BadInputError(msg) from error

    @property
    def num_parameters(self) -> int:
        """Return the number of trained parameters."""
        return sum(each.numel() for each in self._trained())

    @property
    def bytes(self) -> int:
        """Return the size of the adapter's matrices in bytes."""
        return sum(tensor_bytes(each) for each in self._trained())

    def save(self, folder: Path, base: FolderModel | ArtefactModel, digest: str) -> None:
        """Write the adapter in peft's format; ``digest`` identifies the base's weights."""
        from peft import get_peft_model_state_dict

        config = self._tuned.peft_config["default"]
        config.base_model_name_or_path = name_of_base(base)
        config.inference_mode = True
        config.save_pretrained(str(folder))
        state = get_peft_model_state_dict(self._tuned, save_embedding_layers=False)
        tensors = {name: each.detach().cpu().contiguous() for name, each in state.items()}
        save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt", BASE_KEY: digest})

    def merge(self) -> PreTrainedModel:
        """Return the model with the adapter merged into its full-width weights."""
        if self._original is None:
            return cast("PreTrainedModel", self._tuned.merge_and_unload())
        from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

        state = get_peft_model_state_dict(self._tuned, save_embedding_layers=False)
        whole = get_peft_model(self._original(), self._tuned.peft_config["default"])
        set_peft_model_state_dict(whole, state)
        return cast("PreTrainedModel", whole.merge_and_unload())

    def _trained(self) -> list[torch.nn.Parameter]:
        return [each for each in self._tuned.parameters() if each.requires_grad]


def name_of_base(base: FolderModel | ArtefactModel) -> str:
    """Return a base's path below the host's folders."""
    if isinstance(base, ArtefactModel):
        return f"attempts/{base.attempt_id}/output/{base.name}"
    return base.path


def weights_digest(folder: Path) -> str:
    """Return a digest that identifies a model's weights.

    It reads samples spread over every safetensors file, so that large models take no longer. It
    distinguishes trainings, but does not detect single changed bytes.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for at in range(SAMPLES):
                file.seek(size * at // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
