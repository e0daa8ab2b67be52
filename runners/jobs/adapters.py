"""LoRA adapters: their files and layers."""

# mypy: disable-error-code="no-untyped-call"
# safetensors has no types.
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from runners.jobs.adapter_config import (
    CONFIG_NAME,
    SIDES,
    WEIGHTS_NAME,
    place_of,
    refuse,
    scale_of,
)
from runners.jobs.loading import stored_quantisation
from runners.jobs.memory import tensor_bytes
from runners.jobs.model_files import opened_model, read_config, weight_files
from runners.jobs.runtime import BadInputError
from runners.jobspec import ArtefactModel, FolderModel, ModelRef, NamedAdapter
from runners.jobspec.base import LoraOptions
from runners.jobspec.serve import NO_ADAPTER

if TYPE_CHECKING:  # other jobs start faster without it
    from peft import LoraConfig

# ---------------------------------------------------------------------------
# LoRA, QLoRA and DoRA adapters with peft: injection, saving in peft's format, merging.
#
# The model is changed in place; only the adapter's matrices require gradients. peft is imported
# when an adapter is created, so that other jobs start faster.
#
# Source: Hu et al. 2021, arXiv:2106.09685.
# ---------------------------------------------------------------------------


BASE_KEY = "base_sha256"  # in the safetensors metadata, which peft ignores
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
        config = lora_config(options)
        from peft import get_peft_model

        self._original = original
        try:
            self._tuned = get_peft_model(model, config)
        except ValueError as error:
            msg = (
                f"lora.targets {options.targets} names no layers of {type(model).__name__}: "
                f"{str(error)[:200]}; choose all"
            )
            raise BadInputError(msg) from error

    @classmethod
    def of(
        cls,
        tuned: Any,  # noqa: ANN401 - a model of peft
        original: Callable[[], PreTrainedModel] | None = None,
    ) -> "Lora":
        """Return the adapter of a model that peft has wrapped already."""
        lora = cls.__new__(cls)
        lora._tuned, lora._original = tuned, original  # noqa: SLF001 - of this very class
        return lora

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
        """Return the model with the adapter's low-rank product added to the base weights.

        A quantised base is not merged into: its unquantised weights are loaded again first.
        """
        if self._original is None:
            return cast("PreTrainedModel", self._tuned.merge_and_unload())
        from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

        state = get_peft_model_state_dict(self._tuned, save_embedding_layers=False)
        whole = get_peft_model(self._original(), self._tuned.peft_config["default"])
        set_peft_model_state_dict(whole, state)
        return cast("PreTrainedModel", whole.merge_and_unload())

    def _trained(self) -> list[torch.nn.Parameter]:
        return [each for each in self._tuned.parameters() if each.requires_grad]


def lora_config(options: LoraOptions, *, scores: bool = False) -> "LoraConfig":
    """Return peft's configuration; ``scores``: of a model with one output, whose head is trained.

    Raises:
        BadInputError: peft is not installed.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        msg = "adapters need peft on this host: pip install 'slipway[gpu]'"
        raise BadInputError(msg) from error
    return LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules="all-linear" if options.targets == "all" else None,
        task_type="SEQ_CLS" if scores else "CAUSAL_LM",
        use_dora=options.is_dora,
    )


def name_of_base(base: FolderModel | ArtefactModel) -> str:
    """Return a base's path below the host's folders."""
    if isinstance(base, ArtefactModel):
        return f"attempts/{base.attempt_id}/output/{base.name}"
    return base.path


def weights_digest(folder: Path) -> str:
    """Return a digest that identifies a model's weights.

    It reads samples spread over every file of the model, so that large models take no longer. It
    distinguishes trainings, but does not detect single changed bytes.
    """
    digest = hashlib.sha256()
    for path in weight_files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for at in range(SAMPLES):
                file.seek(size * at // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


# ---------------------------------------------------------------------------
# Adapters in peft's format: read from a folder, and many of them applied in one batch.
# ---------------------------------------------------------------------------


# mypy: disable-error-code="no-untyped-call"
# safetensors has no types.


def opened_adapter(ref: FolderModel | ArtefactModel, host_dir: Path) -> Path:
    """Return a private folder of the opened files of an adapter.

    Raises:
        MissingModelError: the adapter is outside the roots, absent, or incomplete.
        BadInputError: a file is not a regular file.
    """
    return opened_model(ref, host_dir, (CONFIG_NAME, WEIGHTS_NAME))


def base_digest(ref: ModelRef, host_dir: Path) -> str | None:
    """Return the digest of a base's weights, or None if it cannot match an adapter's.

    Random and compressed weights are not those that an adapter was trained on.
    """
    if not isinstance(ref, FolderModel | ArtefactModel):
        return None
    folder = opened_model(ref, host_dir)
    return None if stored_quantisation(folder) else weights_digest(folder)


@dataclass(frozen=True)
class LoraPair:
    """The two matrices of one linear layer: W x + up (down x), with the scale in ``up``."""

    down: torch.Tensor  # [rank, inputs]
    up: torch.Tensor  # [outputs, rank]


@dataclass(frozen=True)
class Adapter:
    """One adapter that fits its base: a pair per adapted linear layer."""

    name: str
    pairs: Mapping[str, LoraPair]  # by the layer's name in the base


def read_adapter(name: str, folder: Path, model: torch.nn.Module, digest: str | None) -> Adapter:
    """Return the adapter of a folder; ``digest`` is the base's, or None if unknown.

    Raises:
        BadInputError: the adapter is of another kind, base or shape, or incomplete.
    """
    scale = scale_of(name, read_config(folder / CONFIG_NAME))
    tensors, base = _tensors(name, folder / WEIGHTS_NAME)
    if digest is not None and base not in {None, digest}:
        msg = (
            f"adapter {name} was trained on other weights (base {str(base)[:12]}, here is "
            f"{digest[:12]}); serve it on the model that it was trained on"
        )
        raise BadInputError(msg)
    sides: dict[str, dict[int, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        module, side = place_of(name, key)
        sides.setdefault(module, {})[side] = tensor
    if not sides:
        refuse(name, "holds no matrix")
    pairs = {module: _pair(name, module, own, model) for module, own in sides.items()}
    return Adapter(
        name, {module: LoraPair(each.down, each.up * scale) for module, each in pairs.items()}
    )


def _tensors(name: str, path: Path) -> tuple[dict[str, torch.Tensor], str | None]:
    """Return every tensor, and the base digest in the file."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no dict
            base = (file.metadata() or {}).get(BASE_KEY)
    except SafetensorError as error:
        refuse(name, f"is cut off or no safetensors file ({str(error)[:120]}); copy it again")
    for key, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            refuse(name, f"has NaN or infinity in {key}; train it again")
    return tensors, base


def _pair(
    name: str, module: str, own: Mapping[int, torch.Tensor], model: torch.nn.Module
) -> LoraPair:
    try:
        linear = model.get_submodule(module)
    except AttributeError:
        refuse(name, f"changes {module[:120]}, which this base does not have")
    inputs, outputs = getattr(linear, "in_features", None), getattr(linear, "out_features", None)
    if linear is getattr(model, "lm_head", None):
        refuse(name, f"changes {module}, the output layer, which is not applied here")
    if len(own) != len(SIDES):
        refuse(name, f"holds one of two matrices of {module}")
    down, up = own[0], own[1]
    rank = down.shape[0]
    if list(down.shape) != [rank, inputs] or list(up.shape) != [outputs, rank]:
        refuse(
            name,
            f"has matrices {list(down.shape)} and {list(up.shape)} for {module}, which has "
            f"{inputs} inputs and {outputs} outputs in this base",
        )
    return LoraPair(down, up)


# Applies many adapters in one batch: each token uses its own adapter, or none.
#
# A layer's adapter matrices are concatenated: one product of all tokens with all of them, the
# columns of other adapters masked, one product back. On the CPU two products of a few hundred
# columns cost less than one small product per adapter. The base is computed once for all.
#
# Source: Zhou et al. 2022 (PetS), USENIX ATC, section 4.


NONE = NO_ADAPTER  # the base alone


class LoraStack:
    """The concatenated adapter matrices of one linear layer."""

    def __init__(self, pairs: Sequence[LoraPair | None], like: torch.Tensor, widest: int) -> None:
        """Concatenate the pairs, each padded to the widest; None changes nothing."""
        down = like.new_zeros(len(pairs), widest, _first(pairs).down.shape[1])
        up = like.new_zeros(len(pairs), widest, _first(pairs).up.shape[0])
        for at, pair in enumerate(pairs):
            if pair is not None:
                down[at, : pair.down.shape[0]] = pair.down
                up[at, : pair.up.shape[1]] = pair.up.T
        self.down = down
        self.up = up

    def change(
        self, inputs: torch.Tensor, present: Sequence[int], own: torch.Tensor
    ) -> torch.Tensor:
        """Return the adapters' contribution to the layer's outputs.

        ``own`` is 1 where a column belongs to the token's adapter, else 0.
        """
        whole = len(present) == len(self.down)
        down = self.down if whole else self.down[list(present)]
        up = self.up if whole else self.up[list(present)]
        inner = inputs.to(down.dtype) @ down.flatten(0, 1).T
        return (inner * own) @ up.flatten(0, 1)


class MixedAdapters:
    """Adapters attached to a model; within ``serving`` each token has its own."""

    def __init__(self, model: torch.nn.Module, adapters: Sequence[Adapter]) -> None:
        """Attach the adapters to the linear layers that any of them changes."""
        self.names = tuple(each.name for each in adapters)
        self._stacks: list[LoraStack] = []
        self._present: tuple[int, ...] = ()
        self._own: torch.Tensor | None = None
        like = next(each for each in model.parameters() if each.is_floating_point())
        ranks = [pair.down.shape[0] for each in adapters for pair in each.pairs.values()]
        self._widest = max(ranks, default=0)
        for name in sorted({name for each in adapters for name in each.pairs}):
            pairs = [each.pairs.get(name) for each in adapters]
            self._attach(model.get_submodule(name), LoraStack(pairs, like, self._widest))
        self._like = like

    @property
    def bytes(self) -> int:
        """Return the size of all adapters' matrices in bytes."""
        return sum(tensor_bytes(each.down) + tensor_bytes(each.up) for each in self._stacks)

    @contextmanager
    def serving(self, owners: torch.Tensor) -> Iterator[None]:
        """Select each token's adapter while the block runs.

        ``owners`` has the shape of the model's inputs, or one that broadcasts to it: the index of
        each token's adapter, ``NONE`` for the base only.
        """
        self._present = tuple(sorted(set(owners.flatten().tolist()) - {NONE}))
        places = torch.tensor(self._present, dtype=owners.dtype).repeat_interleave(self._widest)
        own = owners[..., None] == places
        self._own = own.to(self._like.device, self._like.dtype) if self._present else None
        try:
            yield
        finally:
            self._own = None

    def _attach(self, linear: torch.nn.Module, stack: LoraStack) -> None:
        self._stacks.append(stack)

        def add(
            _linear: torch.nn.Module, inputs: tuple[torch.Tensor, ...], outputs: torch.Tensor
        ) -> torch.Tensor:
            if self._own is None:
                return outputs
            change = stack.change(inputs[0], self._present, self._own)
            return outputs + change.to(outputs.dtype)

        linear.register_forward_hook(add)


def attach_adapters(
    model: torch.nn.Module, base: ModelRef, requested: Sequence[NamedAdapter], host_dir: Path
) -> MixedAdapters | None:
    """Attach a job's adapters to its model and return them, or None if it has none.

    Raises:
        BadInputError: an adapter is incomplete, or not for this model.
        MissingModelError: an adapter does not exist.
    """
    if not requested:
        return None
    digest = base_digest(base, host_dir)
    opened = [
        read_adapter(each.name, opened_adapter(each.adapter, host_dir), model, digest)
        for each in requested
    ]
    return MixedAdapters(model, opened)


def _first(pairs: Sequence[LoraPair | None]) -> LoraPair:
    return next(each for each in pairs if each is not None)
