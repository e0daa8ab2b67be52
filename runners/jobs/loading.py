"""Load a model: its empty module first, then the weights."""

import importlib
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TorchAoConfig,
)

from runners.jobs.model_files import check_config, opened_model, read_config, some
from runners.jobs.runtime import BadInputError, Job, MissingModelError
from runners.jobs.weights import (
    QUANT_METHOD,
    StoredTensors,
    WeightReader,
    check_finite_tensors,
    check_shapes,
    checked_model,
    config_of,
    first_line,
    is_ternary,
    load_ternary,
)
from runners.jobspec import (
    DemoModel,
    ModelRef,
    RandomModel,
)
from runners.jobspec.base import ENCODERS
from runners.jobspec.compress import NF4_BLOCK, QUANTISED_DTYPES, WeightDtype

# ---------------------------------------------------------------------------
# Loads models for every job, by reference, weight dtype and device.
# ---------------------------------------------------------------------------


# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions without.


TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CODE_FORMATS = ("pack-quantized", "int-quantized")
PACKED_INT4_BITS = 4  # 3 and 2 bits also count as int4
BASE_DTYPE = torch.bfloat16  # of unquantised weights next to int8 and int4 matrices
# Common fields that an architecture reads under another name, or computes.
LIBRARY_NAMES = {
    "opt": {"ffn_dim": "intermediate_size", "word_embed_proj_dim": "hidden_size"},
    "falcon": {"num_kv_heads": "num_key_value_heads"},
}
DERIVED_FIELDS = {"falcon": ("head_dim",)}
HOW_QUANTISED = {
    "int8": "torchao Int8WeightOnlyConfig: one scale per output row; lm_head and embedding bf16",
    "int8_dynamic": "torchao Int8DynamicActivationInt8WeightConfig: one scale per output row, and "
    "each token's activations to 8 bits as they come; lm_head and embedding bf16",
    "fp8": "torchao Float8WeightOnlyConfig: e4m3, one scale per output row; products in bf16; "
    "lm_head and embedding bf16",
    "int4": "bitsandbytes nf4: packed 4 bit, one scale per 64 weights; lm_head and embedding bf16",
}


RANDOM_WEIGHTS = (
    "random, in the shape of the job's config, as its spec names no folder: speed and memory are "
    "real, text and its quality are not"
)


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device, with its tokenizer if it has one."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast | None
    device: torch.device

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters of the architecture, independent of packing."""
        return parameter_count(self.model.config)


def pick_device() -> torch.device:
    """Return the first CUDA device, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def note_weights(job: Job, ref: ModelRef) -> None:
    """Add to the result that weights are random; a child process cannot add it to its parent's."""
    if isinstance(ref, DemoModel | RandomModel):
        job.emitter.notes["weights"] = RANDOM_WEIGHTS


def load_model(
    job: Job, ref: ModelRef, dtype: WeightDtype | None, device: torch.device | None = None
) -> LoadedModel:
    """Return the referenced model with weights in ``dtype``.

    None loads a quantised folder as stored, and every other in bf16.

    Raises:
        MissingModelError: the folder is absent, incomplete or outside the model roots.
        BadInputError: the folder is already quantised with another dtype.
    """
    device = device or pick_device()
    if isinstance(ref, DemoModel):
        ref = RandomModel(config=demo_config(ref))
    if isinstance(ref, RandomModel):
        job.emitter.log(f"the model's weights: {RANDOM_WEIGHTS}")
        note_weights(job, ref)
        return LoadedModel(_load_random(job, ref, dtype or "bf16", device), None, device)
    folder = opened_model(ref, job.host_dir)
    dtype = dtype or stored_quantisation(folder) or "bf16"
    return LoadedModel(load_folder(folder, dtype, device), load_tokenizer(folder), device)


def demo_config(ref: DemoModel) -> dict[str, object]:
    """Return the config.json of the demo model's shape."""
    return {
        "model_type": "llama",
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        **ref.model_dump(exclude={"source"}),
    }


def preload_library(dtype: WeightDtype, *, is_layerwise: bool = False) -> None:
    """Import the libraries of ``dtype`` before memory is measured."""
    if is_layerwise:
        importlib.import_module("compressed_tensors")
    elif dtype == "int4":
        importlib.import_module("bitsandbytes")


def load_folder(
    folder: Path, dtype: WeightDtype, device: torch.device, *, rounds_inputs: bool = False
) -> PreTrainedModel:
    """Return the causal language model of a folder, in evaluation mode.

    ``rounds_inputs`` applies to int8 quantisation while loading; a quantised folder states it.
    """
    stored = stored_quantisation(folder)
    if stored is not None and stored != dtype:
        msg = f"{folder} holds {stored} weights: load it as {stored}, or use the unquantised model"
        raise BadInputError(msg)
    if is_ternary(folder):
        return ready(load_ternary(folder, BASE_DTYPE), device=device)
    options: dict[str, Any] = {
        "dtype": TORCH_DTYPES.get(dtype, BASE_DTYPE),
        "device_map": str(device),
    }
    if stored is None and dtype in QUANTISED_DTYPES:
        _check_quantisable(folder, dtype)
        options["quantization_config"] = _quantisation_config(dtype, rounds_inputs=rounds_inputs)
    return ready(checked_model(folder, options, is_plain=stored is None))


def stored_quantisation(folder: Path) -> WeightDtype | None:
    """Return the quantised dtype of the folder's stored weights, or None for plain weights."""
    quantisation = read_config(folder / "config.json").get("quantization_config")
    if quantisation is None:
        return None
    if not isinstance(quantisation, dict):
        msg = f"{folder}: config.json: quantization_config is {quantisation!r:.60}, not an object"
        raise BadInputError(f"{msg}; remove the entry, or copy the file again")
    method = quantisation.get("quant_method")
    if method == QUANT_METHOD:
        return "int4"
    if method == "torchao":
        return "fp8" if "Float8" in str(quantisation.get("quant_type")) else "int8"
    if method == "bitsandbytes" and quantisation.get("load_in_4bit"):
        return "int4"
    if method == "compressed-tensors" and quantisation.get("format") in CODE_FORMATS:
        groups = (quantisation.get("config_groups") or {}).values()
        bits = max((int(each["weights"]["num_bits"]) for each in groups), default=8)
        return "int4" if bits <= PACKED_INT4_BITS else "int8"
    msg = f"{folder} is quantised by '{method}', which this version cannot run"
    raise BadInputError(f"{msg}; use the unquantised model")


def require_plain(folder: Path) -> None:
    """Reject a folder whose stored weights are quantised.

    Raises:
        BadInputError: they are; the message names how.
    """
    if (stored := stored_quantisation(folder)) is not None:
        msg = f"{folder.name} holds {stored} weights, and this reads unquantised ones"
        raise BadInputError(f"{msg}; use the unquantised model")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast | None:
    """Return the folder's fast tokenizer, or None.

    Raises:
        BadInputError: the library cannot read it.
    """
    if not (folder / "tokenizer.json").is_file():
        return None
    try:
        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(
            str(folder), local_files_only=True
        )
    except Exception as error:  # tokenizers raises nothing narrower
        msg = f"{folder.name}: tokenizer.json or tokenizer_config.json cannot be read"
        raise BadInputError(f"{msg}: {first_line(error)}; copy both again") from error
    return tokenizer


def require_tokenizer(loaded: LoadedModel, what_for: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer.

    Raises:
        MissingModelError: the model folder has no tokenizer.json.
    """
    if loaded.tokenizer is None:
        msg = f"the model has no tokenizer.json, which {what_for} needs; add it to the folder"
        raise MissingModelError(msg)
    return loaded.tokenizer


def end_ids(loaded: LoadedModel) -> frozenset[int]:
    """Return the end-of-sequence tokens of model and tokenizer."""
    token_ids = getattr(loaded.model.generation_config, "eos_token_id", None)
    ids = set(token_ids if isinstance(token_ids, list) else [token_ids])
    if loaded.tokenizer is not None:
        ids.add(loaded.tokenizer.eos_token_id)
    return frozenset(each for each in ids if isinstance(each, int))


def ready(
    model: PreTrainedModel,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """Return the model on the device, with its weights in the dtype, in evaluation mode.

    Buffers keep their dtype, as when a folder is loaded: rotary frequencies cast to bf16 changed
    perplexity by 6e-5.
    """
    torch.nn.Module.to(model, device=device)
    if dtype is not None:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    torch.nn.Module.eval(model)
    return model


def quantised_matrices(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the matrices that int8 and int4 quantise: all linear layers except lm_head."""
    return {
        name: module.weight
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings()
    }


def parameter_count(config: PretrainedConfig) -> int:
    """Return the number of parameters of a config's architecture."""
    return sum(each.numel() for each in shape_only(config).parameters())


def shape_only(config: PretrainedConfig) -> PreTrainedModel:
    """Return an unquantised model of the architecture on the meta device."""
    plain = config.__class__(**{**config.to_dict(), "quantization_config": None})
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(plain)
    return model


def library_fields(model_type: str, config: dict[str, object]) -> dict[str, object]:
    """Return a config's fields under the names that the library reads.

    The library silently ignores fields with other names: a 13-billion-parameter OPT was built
    with 6 billion.
    """
    fields = {name: value for name, value in config.items() if name != "model_type"}
    for theirs, common in LIBRARY_NAMES.get(model_type, {}).items():
        if common in fields:
            fields.setdefault(theirs, fields[common])
    for name in DERIVED_FIELDS.get(model_type, ()):
        fields.pop(name, None)
    return fields


def fresh_model(config: dict[str, object], dtype: torch.dtype) -> PreTrainedModel:
    """Return a model of a config.json with freshly initialised weights.

    Raises:
        BadInputError: the config names no known architecture or contradicts itself.
    """
    check_config(config, "the job's model")
    model_type = str(config.get("model_type", ""))
    try:
        parsed = AutoConfig.for_model(model_type, **library_fields(model_type, config))
        model: PreTrainedModel = AutoModelForCausalLM.from_config(parsed, dtype=dtype)
    except (StrictDataclassError, ValueError, KeyError, TypeError, AttributeError) as error:
        msg = f"config.json describes no model that can be built here: {first_line(error)}"
        raise BadInputError(msg) from error
    return model


def _load_random(
    job: Job, ref: RandomModel, dtype: WeightDtype, device: torch.device
) -> PreTrainedModel:
    """Return a random model; quantised weights are saved and reloaded to be packed as usual."""
    torch.manual_seed(getattr(job.spec, "seed", 0))
    base = TORCH_DTYPES.get(dtype, BASE_DTYPE)
    model = fresh_model(ref.config, base)
    if dtype not in QUANTISED_DTYPES:
        return ready(model, device=device)
    folder = job.scratch_dir() / "random-model"
    model.save_pretrained(str(folder))
    del model
    try:
        return load_folder(folder, dtype, device)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _quantisation_config(
    dtype: WeightDtype, *, rounds_inputs: bool
) -> TorchAoConfig | BitsAndBytesConfig:
    from torchao.quantization import (  # it is large, and most jobs do without it
        Float8WeightOnlyConfig,
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
    )

    if dtype == "int8":
        dynamic = Int8DynamicActivationInt8WeightConfig
        return TorchAoConfig(dynamic() if rounds_inputs else Int8WeightOnlyConfig())
    if dtype == "fp8":
        return TorchAoConfig(Float8WeightOnlyConfig())
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=BASE_DTYPE
    )


def _check_quantisable(folder: Path, dtype: WeightDtype) -> None:
    """Reject weights with other shapes than the config's, which quantising loaders ignore.

    Also rejects nf4 for rows that are not a multiple of its block: the CPU kernel fails on them.
    """
    skeleton = shape_only(config_of(folder))
    check_shapes(folder, skeleton)
    for name, weight in quantised_matrices(skeleton).items():
        if dtype == "int4" and weight.shape[1] % NF4_BLOCK:
            msg = (
                f"{name} has rows of {weight.shape[1]} weights, and int4 needs multiples of "
                f"{NF4_BLOCK}; choose int8 for this model"
            )
            raise BadInputError(msg)


# Switches a model's attention implementation.


@contextmanager
def use_attn_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Use another attention implementation while the block runs."""
    before = str(model.config._attn_implementation)  # noqa: SLF001 - there is no other reader
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


# ---------------------------------------------------------------------------
# Models on the meta device, and models with one decoder layer at a time in memory.
# ---------------------------------------------------------------------------


# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions without.


EXPERT_TENSOR = re.compile(r"^(?P<place>.+\.experts)\.(?P<expert>\d+)\.(?P<word>\w+)\.weight$")
ROLES = {
    "w1": "gate", "w3": "up", "w2": "down",
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
}  # fmt: skip
GATE_UP, DOWN = "gate_up_proj", "down_proj"
Roles = dict[str, str]  # gate, up, down -> the stored tensor's name


class Expert(NamedTuple):
    """The weights of one expert: stacked gate and up projections, and down projection."""

    gate_up: torch.Tensor
    down: torch.Tensor


class ModelTensors:
    """A folder's tensors by the model's names; experts individually or stacked."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Open the files.

        Raises:
            BadInputError: the weights are quantised, or not floats of 16 or 32 bits.
        """
        require_plain(folder)
        self._files = StoredTensors(folder)
        self._device, self._dtype = device, dtype
        self._plain: dict[str, str] = {}
        self.experts: dict[str, dict[int, Roles]] = defaultdict(dict)  # place -> expert -> roles
        for stored in self._files.names:
            name = stored.replace(".block_sparse_moe.", ".mlp.")
            match = EXPERT_TENSOR.match(name)
            if match and match["word"] in ROLES:
                roles = self.experts[match["place"]].setdefault(int(match["expert"]), {})
                roles[ROLES[match["word"]]] = stored
            else:
                self._plain[name] = stored

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors, including stacked experts."""
        stacks = [f"{place}.{stack}" for place in self.experts for stack in (GATE_UP, DOWN)]
        return [*self._plain, *stacks]

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor on the device.

        Raises:
            BadInputError: the tensor has NaN or infinity.
        """
        if name in self._plain:
            tensor = self._read(self._plain[name])
        else:
            place, _, which = name.rpartition(".")
            experts = [self.expert(place, index) for index in range(len(self.experts[place]))]
            tensor = torch.stack([one.down if which == DOWN else one.gate_up for one in experts])
        check_finite_tensors({name: tensor}, "")
        return tensor

    def expert(self, place: str, index: int) -> Expert:
        """Return one expert of the layer named ``place``, on the device."""
        roles = self.experts[place][index]
        gate, up, down = (self._read(roles[role]) for role in ("gate", "up", "down"))
        return Expert(torch.cat([gate, up]), down)

    def _read(self, stored: str) -> torch.Tensor:
        return self._files.read(stored).to(self._device, self._dtype)


def skeleton(config: PretrainedConfig, dtype: torch.dtype, folder: Path | None) -> PreTrainedModel:
    """Return a model of the config on the meta device, for inference."""
    is_classifier = config.model_type in ENCODERS
    kind = AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM
    from accelerate import init_empty_weights  # jobs on one device do without it

    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = kind.from_config(config, dtype=dtype)
    if folder is not None and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(folder))
    torch.nn.Module.eval(model)
    return model


def fill(
    model: nn.Module,
    names: Iterable[str],
    read: Callable[[str], torch.Tensor],
    device: torch.device,
) -> None:
    """Load weights into a model or module; ``read`` returns each by its name there.

    Raises:
        BadInputError: weights are missing or do not match the config.
    """
    tensors = {name: read(name) for name in names}
    try:
        unknown = model.load_state_dict(tensors, strict=False, assign=True).unexpected_keys
    except RuntimeError as error:  # a shape differs from the config's
        raise _mismatch(str(error).strip().splitlines()[-1].strip()) from error
    if isinstance(model, PreTrainedModel):
        model.tie_weights()
    missing = [name for name, each in model.named_parameters() if each.is_meta]
    for names_, word in ((missing, "lack"), (unknown, "also hold")):
        if names_:
            raise _mismatch(f"they {word} {some(names_)}")
    for name, buffer in list(model.named_buffers()):
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, buffer.to(device))


def _mismatch(what: str) -> BadInputError:
    return BadInputError(
        f"the weights do not match config.json: {what}; give the config and the weights of one "
        "model"
    )


# A causal language model with the weights of one decoder layer at a time in memory.
#
# Embeddings, last norm and output stay in memory; each layer is loaded and dropped in turn, so
# that memory is needed for one layer, the embeddings and the text's activations.


# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions without.


SEQUENCES_AT_ONCE = 4
Hidden = torch.Tensor
Extra = Mapping[str, Any]  # a layer's arguments besides the hidden states


class LayerwiseModel:
    """The skeleton of a model folder, the names of its layers' weights, and their reader."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Load everything except the decoder layers.

        Raises:
            BadInputError: the architecture is not supported, or config and weights do not match.
        """
        require_plain(folder)
        self.config = config_of(folder)
        with init_empty_weights(include_buffers=False):
            self.model: PreTrainedModel = AutoModelForCausalLM.from_config(
                self.config, dtype=dtype
            )
        self.device = device
        self.dtype = dtype
        self.layers, self.prefix = _decoder_layers(self.model)
        self.reader = WeightReader(folder, self.model)
        torch.nn.Module.eval(self.model)
        around = {name: self.read(name) for name in self.names_around()}
        self.model.load_state_dict(around, strict=False, assign=True)
        self.model.tie_weights()
        for name, buffer in list(self.model.named_buffers()):
            owner, _, last = name.rpartition(".")
            setattr(self.model.get_submodule(owner), last, buffer.to(device))

    def names_around(self) -> list[str]:
        """Return the names of stored tensors outside of the decoder layers."""
        return [name for name in self.reader.names if not name.startswith(f"{self.prefix}.")]

    def name_of(self, index: int, name: str) -> str:
        """Return the full name of a layer's tensor or module."""
        return f"{self.prefix}.{index}.{name}"

    def load_layer(self, index: int) -> torch.nn.Module:
        """Return the layer with its weights."""
        layer = self.layers[index]
        own = f"{self.prefix}.{index}."
        names = [name for name in self.reader.names if name.startswith(own)]
        tensors = {name.removeprefix(own): self.read(name) for name in names}
        layer.load_state_dict(tensors, strict=False, assign=True)
        return layer

    def drop_layer(self, index: int) -> None:
        """Free the layer's weights."""
        torch.nn.Module.to(self.layers[index], "meta")

    @torch.no_grad()
    def embed(self, ids: torch.Tensor) -> tuple[Hidden, list[Extra]]:
        """Return the first layer's inputs, and the other arguments of each layer.

        ``ids`` [sequences, tokens] have one length, so the arguments of the first apply.
        """
        calls: list[tuple[Hidden, Extra]] = []

        def pass_on(hidden: Hidden, **extra: Any) -> Hidden:
            calls.append((hidden, extra))
            return hidden

        with self._layers_as(pass_on):
            for row in ids.split(1):
                self.model(row.to(self.device), use_cache=False, logits_to_keep=1)
        count = len(self.layers)
        return torch.cat([hidden for hidden, _ in calls[::count]]), [
            extra for _, extra in calls[:count]
        ]

    @torch.no_grad()
    def run(self, index: int, hidden: Hidden, extra: Extra) -> Hidden:
        """Return the loaded layer's outputs for all sequences."""
        layer = self.layers[index]
        outputs = [layer(some, **extra) for some in hidden.split(SEQUENCES_AT_ONCE)]
        return torch.cat([each[0] if isinstance(each, tuple) else each for each in outputs])

    @torch.no_grad()
    def logits(self, hidden: Hidden, ids: torch.Tensor, keep: int) -> torch.Tensor:
        """Return the logits of the last ``keep`` positions from the last layer's outputs."""
        with self._layers_as(lambda _given, **_extra: hidden):
            output = self.model(ids.to(self.device), use_cache=False, logits_to_keep=keep)
        values: torch.Tensor = output.logits
        return values

    @torch.no_grad()
    def enter(self, **call: Any) -> tuple[Hidden, list[Extra]]:
        """Return the first layer's inputs in a model call, and the layers' other arguments."""
        calls: list[tuple[Hidden, Extra]] = []

        def pass_on(hidden: Hidden, **extra: Any) -> Hidden:
            calls.append((hidden, extra))
            return hidden

        with self._layers_as(pass_on):
            self.model.base_model(**call)
        return calls[0][0], [extra for _, extra in calls]

    def linears(self, index: int) -> dict[str, torch.nn.Linear]:
        """Return the layer's linear modules by their names within it."""
        modules = self.layers[index].named_modules()
        return {name: each for name, each in modules if isinstance(each, torch.nn.Linear)}

    @contextmanager
    def _layers_as(self, function: Callable[..., Hidden]) -> Iterator[None]:
        for layer in self.layers:
            vars(layer)["forward"] = function
        try:
            yield
        finally:
            for layer in self.layers:
                del vars(layer)["forward"]

    def read(self, name: str) -> torch.Tensor:
        """Return a stored tensor on the device, in the model's dtype."""
        return self.reader.read(name).to(self.device, self.dtype)


def _decoder_layers(model: PreTrainedModel) -> tuple[torch.nn.ModuleList, str]:
    count = int(model.config.num_hidden_layers)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return module, name
    msg = f"a '{model.config.model_type}' model has no list of {count} decoder layers"
    raise BadInputError(msg)
