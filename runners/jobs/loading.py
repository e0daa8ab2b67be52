"""Loads models for every job, by reference, weight dtype and device."""

import importlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TorchAoConfig,
)

from runners.jobs.model_files import check_config, opened_model
from runners.jobs.runtime import BadInputError, Job, MissingModelError
from runners.jobs.ternary_files import QUANT_METHOD, is_ternary, load_ternary
from runners.jobs.weights import check_shapes, checked_model, first_line
from runners.jobspec import (
    DemoModel,
    ModelRef,
    RandomModel,
)
from runners.jobspec.compress import NF4_BLOCK, QUANTISED_DTYPES, WeightDtype

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
        msg = f"{folder} holds {stored} weights: load it as {stored}, or take its original"
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
    config = json.loads((folder / "config.json").read_text())
    quantisation = config.get("quantization_config")
    if quantisation is None:
        return None
    method = quantisation.get("quant_method")
    if method == QUANT_METHOD:
        return "int4"
    if method == "torchao":
        return "fp8" if "Float8" in str(quantisation.get("quant_type")) else "int8"
    if method == "bitsandbytes" and quantisation.get("load_in_4bit"):
        return "int4"
    if method == "compressed-tensors" and quantisation.get("format") in CODE_FORMATS:
        return "int4" if _packed_bits(quantisation) <= PACKED_INT4_BITS else "int8"
    msg = f"{folder} is quantised by '{method}', which this version cannot run; take its original"
    raise BadInputError(msg)


def _packed_bits(quantisation: dict[str, Any]) -> int:
    groups = quantisation.get("config_groups") or {}
    return max((int(group["weights"]["num_bits"]) for group in groups.values()), default=8)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast | None:
    """Return the folder's fast tokenizer, or None."""
    if not (folder / "tokenizer.json").is_file():
        return None
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(
        str(folder), local_files_only=True
    )
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
    skeleton = shape_only(AutoConfig.from_pretrained(str(folder), local_files_only=True))
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
def attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Use another attention implementation while the block runs."""
    before = str(model.config._attn_implementation)  # noqa: SLF001 - there is no other reader
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
