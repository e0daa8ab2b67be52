"""Small repositories for the test hub: real architectures with random weights, and plain files.

    python -m tests.hub.models FOLDER

writes them all, for ``python -m tests.hub.hub_server FOLDER``. torch is loaded where it is used.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

# 1 to 3 million parameters, with head sizes that all engines have kernels for.
SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {**EXPERTS, "num_experts": 8, "norm_topk_prob": True},
    "gpt_oss": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128,
        "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150_000.0},
    },
    "gemma3_text": {
        "sliding_window": 64, "query_pre_attn_scalar": 64, "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}  # fmt: skip
OWNER = "tiny"
SHARDED = "qwen3_moe"  # its weights lie in several files
SHARD_BYTES = "1MB"
VOCABULARY = 1024
GGUF_TYPES = ("Q8_0", "F16")
AWQ_GROUP, AWQ_ORDER = 64, [0, 2, 4, 6, 1, 3, 5, 7]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = (
    "A cache keeps what is asked for often. The kernel reads a page, and the next reader finds it "
    "there. Weights of a model are read once for each token, so that memory sets the pace. "
)


def write_files(repository: Path, files: Mapping[str, bytes | str | int], seed: int = 1) -> Path:
    """Write a repository of plain files; a number is a size of random bytes."""
    source = np.random.default_rng(seed)
    for name, content in files.items():
        path = repository / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = source.bytes(content) if isinstance(content, int) else content
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    return repository


def make_tokenizer(folder: Path) -> Any:
    """Write a byte-level tokenizer with a chat template, trained on a few sentences."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([TEXT], trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        bos_token="<|endoftext|>", model_max_length=SHAPE["max_position_embeddings"],
    )  # fmt: skip
    made.chat_template = TEMPLATE
    made.save_pretrained(str(folder))
    return made


def make_model(folder: Path, kind: str) -> Path:
    """Write a repository of an architecture: bf16 weights, config and tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    tokenizer = make_tokenizer(folder)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    fields = SHAPE | {"vocab_size": VOCABULARY, "bos_token_id": tokenizer.bos_token_id} | ends
    config = AutoConfig.for_model(kind, **(fields | ARCHITECTURES[kind]))
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(**ends, do_sample=False)
    model.save_pretrained(str(folder), max_shard_size=SHARD_BYTES if kind == SHARDED else "50GB")
    return folder


def make_gguf(folder: Path, source: Path) -> Path:
    """Write a repository of GGUF files of a llama, one of each type."""
    import torch

    from runners.jobs.compress.gguf import write_gguf
    from runners.jobs.loading import load_folder, load_tokenizer
    from runners.jobs.weights import WeightReader

    folder.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load_folder(source, "fp32", torch.device("cpu")), load_tokenizer(source)
    for kind in GGUF_TYPES:
        path = folder / f"llama-{kind}.gguf"
        write_gguf(path, model.config, WeightReader(source, model), tokenizer, kind)
    model.config.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return folder


def make_awq(folder: Path, source: Path) -> Path:
    """Write a llama of 4 bits as AutoAWQ stores one: codes of 8 outputs in an integer.

    Source: casper-hansen/AutoAWQ, awq/modules/linear/gemm.py, WQLinear_GEMM.from_linear.
    """
    import torch
    from safetensors.torch import load_file, save_file

    def packed(codes: torch.Tensor) -> torch.Tensor:
        eights = codes.to(torch.int64).unflatten(1, (-1, 8))[..., AWQ_ORDER]
        joined = (eights << (4 * torch.arange(8))).sum(-1)
        return torch.where(joined >= 2**31, joined - 2**32, joined).to(torch.int32)

    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if "_proj." not in name:
            tensors[name] = weight.half()
            continue
        groups = weight.float().t().unflatten(0, (-1, AWQ_GROUP))  # [groups, inputs, outputs]
        low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
        scales = ((high - low) / 15).clamp(min=1e-6)
        zeros = (-low / scales).round().clamp(0, 15)
        codes = (groups / scales[:, None] + zeros[:, None]).round().clamp(0, 15)
        own = name.removesuffix("weight")
        tensors |= {
            f"{own}qweight": packed(codes.flatten(0, 1)),
            f"{own}qzeros": packed(zeros),
            f"{own}scales": scales.half(),
        }
    write_files(
        folder,
        {
            each.name: each.read_bytes()
            for each in source.iterdir()
            if each.is_file() and each.suffix != ".safetensors"
        },
    )
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "awq", "bits": 4, "group_size": AWQ_GROUP, "version": "gemm",
        "zero_point": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    return folder


def make_shards(folder: Path, count: int = 300) -> Path:
    """Write a llama whose index names ``count`` files, of a tensor each but the last."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = make_tokenizer(folder)
    small = {
        "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": -(-count // 9),
    }  # fmt: skip
    config = AutoConfig.for_model("llama", **(SHAPE | small | {"vocab_size": VOCABULARY}))
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    torch.manual_seed(11)
    tensors = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
    names, weight_map = list(tensors), {}
    for at in range(count):
        file = f"model-{at + 1:05}-of-{count:05}.safetensors"
        own = names[at:] if at == count - 1 else [names[at]]
        save_file({name: tensors[name].clone() for name in own}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(own, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.eos_token_id = tokenizer.eos_token_id
    config.save_pretrained(str(folder))
    return folder


def make_data_sets(folder: Path) -> None:
    """Write small data sets: chats in Parquet, instructions in lines, one of a script alone."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def rows(kind: str, count: int) -> list[dict[str, Any]]:
        said = [(f"What keeps {kind} {at}?", f"A cache keeps {kind} {at}.") for at in range(count)]
        return [
            {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
            for a, b in said
        ]

    chats = folder / "datasets" / OWNER / "chats"
    (chats / "data").mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 2), ("test", 1)):
        for at in range(count):
            path = chats / "data" / f"{split}-{at:05}-of-{count:05}.parquet"
            pq.write_table(pa.Table.from_pylist(rows(f"{split}{at}", 20)), path)
    entries = [{"instruction": f"Name {at}.", "output": f"It is {at}."} for at in range(40)]
    lines = "".join(f"{json.dumps(each)}\n" for each in entries)
    write_files(
        folder / "datasets" / OWNER / "lines", {"train.jsonl": lines, "README.md": "# Lines"}
    )
    write_files(folder / "datasets" / OWNER / "scripted", {"scripted.py": "raise SystemExit"})


def make_repositories(folder: Path, note: Callable[[str], object] = lambda _text: None) -> None:
    """Write all repositories below a folder: ``tiny/llama`` and so on."""
    for kind in ARCHITECTURES:
        note(f"{OWNER}/{kind}")
        make_model(folder / OWNER / kind, kind)
    note(f"{OWNER}/llama-GGUF")
    make_gguf(folder / OWNER / "llama-GGUF", folder / OWNER / "llama")
    note(f"{OWNER}/llama-AWQ")
    make_awq(folder / OWNER / "llama-AWQ", folder / OWNER / "llama")
    note(f"{OWNER}/llama-300")
    make_shards(folder / OWNER / "llama-300")
    note(f"datasets/{OWNER}")
    make_data_sets(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write small repositories for the test hub.")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    make_repositories(parser.parse_args().folder, lambda text: sys.stdout.write(f"{text}\n"))


if __name__ == "__main__":
    main()
