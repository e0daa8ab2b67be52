"""Export a training plan as a script for the Hugging Face trainer, with adapters if planned."""

import json

from planner.errors import BadRequestError
from planner.exports.case import ExportCase
from planner.exports.training import optimizer_of, steps_of, train_workload
from planner.specs.base import JsonObject
from planner.workload.training_methods import DEFAULT_LORA_RANK

FILE = "train.py"
DEFAULT_STEPS = 100  # for a plan without a stated length
# The trainer's names of optimisers; LOMO's two need the package lomo-optim.
OPTIMIZERS = {
    "adamw": "adamw_torch",
    "adamw_8bit": "adamw_bnb_8bit",
    "adafactor": "adafactor",
    "lion": "lion_32bit",
    "sgd": "sgd",
    "lomo": "lomo",
    "adalomo": "adalomo",
}
TARGETS: dict[str, str | list[str]] = {"all": "all-linear", "query_value": ["q_proj", "v_proj"]}
SCRIPT = '''\
#!/usr/bin/env python3
"""Train as planned, with the Hugging Face trainer under torchrun.

The environment may name DATA, a text file (data.txt), MODEL, other weights, OUTPUT, a folder for
the result (trained), and STEPS, another number of steps.
"""

import json
import os

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

PLAN = json.loads(r\'\'\'@PLAN@\'\'\')
MODEL = os.environ.get("MODEL", PLAN["model"])
ON_GPU = torch.cuda.is_available()


def rows():
    """Return the text as rows of the planned length, without padding."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    with open(os.environ.get("DATA", "data.txt"), encoding="utf-8") as text:
        tokens = tokenizer(text.read())["input_ids"]
    length = PLAN["sequence_length"]
    if len(tokens) < length:
        raise SystemExit(f"DATA has {len(tokens)} tokens, a row takes {length}: give more text")
    cut = [tokens[at : at + length] for at in range(0, len(tokens) - length + 1, length)]
    return [{"input_ids": row, "labels": row} for row in cut]


def model():
    """Return the model that the plan trains."""
    options = {"attn_implementation": "sdpa"} if PLAN["fused_attention"] else {}
    if PLAN["method"] == "pretrain":
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL), **options)
    if PLAN["method"] == "qlora":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if ON_GPU else "cpu"
        options["device_map"] = {"": device}
    wide = torch.bfloat16 if PLAN["lora"] else torch.float32
    loaded = AutoModelForCausalLM.from_pretrained(MODEL, dtype=wide, **options)
    return adapted(loaded) if PLAN["lora"] else loaded


def adapted(loaded):
    """Return the model with the adapters that the plan trains."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    if PLAN["method"] == "qlora":
        loaded = prepare_model_for_kbit_training(
            loaded, use_gradient_checkpointing=PLAN["gradient_checkpointing"]
        )
    elif PLAN["gradient_checkpointing"]:
        loaded.enable_input_require_grads()
    return get_peft_model(loaded, LoraConfig(task_type="CAUSAL_LM", **PLAN["lora"]))


def main():
    """Train and keep the result."""
    output = os.environ.get("OUTPUT", "trained")
    arguments = TrainingArguments(
        output_dir=output,
        per_device_train_batch_size=PLAN["micro_batch_size"],
        gradient_accumulation_steps=PLAN["gradient_accumulation_steps"],
        max_steps=int(os.environ.get("STEPS", PLAN["steps"])),
        optim=PLAN["optimizer"],
        bf16=PLAN["compute_dtype"] == "bf16",
        fp16=PLAN["compute_dtype"] == "fp16" and ON_GPU,
        gradient_checkpointing=PLAN["gradient_checkpointing"] and not PLAN["fsdp"],
        fsdp=bool(PLAN["fsdp"]) or None,
        fsdp_config=PLAN["fsdp"] or None,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=not ON_GPU,
    )
    trainer = Trainer(
        model=model(),
        args=arguments,
        train_dataset=rows(),
        data_collator=default_data_collator,
    )
    trainer.train()
    trainer.save_model(output)


if __name__ == "__main__":
    main()
'''


def train_script(case: ExportCase) -> str:
    """Return the training script of a plan.

    Raises:
        BadRequestError: the method has no public implementation for the trainer.
    """
    workload = train_workload(case)
    if workload.method in {"qft", "alphatuning"}:
        raise BadRequestError(
            f"method {workload.method} has no script for the Hugging Face trainer: launch it as a "
            "job, or choose full, lora or qlora",
            "workload.method",
        )
    # A quote in the plan, such as in the model's name, must not end the string literal.
    plan = json.dumps(script_plan(case), indent=1).replace("'", "\\u0027")
    return SCRIPT.replace("@PLAN@", plan)


def script_plan(case: ExportCase) -> JsonObject:
    """Return the values that the plan sets in the script."""
    workload, strategy = train_workload(case), case.strategy
    recomputes = strategy.activation_recomputation not in {None, "none"}
    stage = strategy.zero_stage or 0
    sharded = stage >= 1 and case.devices > 1 and workload.method != "qlora"
    fsdp = {
        "reshard_after_forward": stage == 3,  # noqa: PLR2004 - ZeRO's last stage
        "activation_checkpointing": recomputes,
        "cpu_offload": case.offload.weights_cpu > 0,
    }
    return {
        "model": case.model,
        "method": workload.method,
        "lora": _lora(case),
        "optimizer": OPTIMIZERS[optimizer_of(case)],
        "sequence_length": workload.sequence_length,
        "micro_batch_size": strategy.micro_batch_size or 1,
        "gradient_accumulation_steps": strategy.gradient_accumulation_steps or 1,
        "steps": steps_of(case) or DEFAULT_STEPS,
        "compute_dtype": strategy.compute_dtype or "bf16",
        "gradient_checkpointing": recomputes,
        "fused_attention": strategy.attention == "flash",
        "fsdp": fsdp if sharded else {},
    }


def _lora(case: ExportCase) -> JsonObject:
    workload = train_workload(case)
    if workload.method not in {"lora", "qlora"}:
        return {}
    rank = workload.lora_rank or DEFAULT_LORA_RANK
    targets = TARGETS[workload.lora_targets or "all"]
    return {"r": rank, "lora_alpha": 2 * rank, "target_modules": targets}
