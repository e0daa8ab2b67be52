"""TRL's own scripts of its objectives, as its documentation writes them: python FILE ARGUMENTS.

The arguments as JSON: model, data, objective, steps, seed and others of the config. The losses go
to stdout as JSON.
"""

import importlib
import json
import runpy
import sys

# The libraries of TRL's environment, which this interpreter alone has.
datasets, peft, trl = map(importlib.import_module, ("datasets", "peft", "trl"))
orpo = importlib.import_module("trl.experimental.orpo")

PAIRS = {
    "next_token": (trl.SFTTrainer, trl.SFTConfig),
    "dpo": (trl.DPOTrainer, trl.DPOConfig),
    "kto": (trl.KTOTrainer, trl.KTOConfig),
    "orpo": (orpo.ORPOTrainer, orpo.ORPOConfig),
    "reward": (trl.RewardTrainer, trl.RewardConfig),
    "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
    "distillation": (trl.DistillationTrainer, trl.DistillationConfig),
}


def main() -> None:
    """Train, and print the losses of all steps."""
    given = json.loads(sys.argv[1])
    trainer_class, config_class = PAIRS[given["objective"]]
    args = config_class(
        output_dir=given["output"],
        max_steps=given["steps"],
        seed=given["seed"],
        per_device_train_batch_size=given["batch"],
        learning_rate=given["learning_rate"],
        **given["lengths"],
        logging_steps=1,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    own = {}
    if rank := given.get("lora_rank"):
        config = peft.LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        own["peft_config"] = config
    if path := given.get("rewards"):
        own["reward_funcs"] = [runpy.run_path(path)["even"]]
    if teacher := given.get("teacher"):
        own["teacher_model"] = teacher
    trainer = trainer_class(
        model=given["model"],
        args=args,
        train_dataset=datasets.load_dataset(
            "json", data_files=given["data"], split="train", cache_dir=given["output"]
        ),
        **own,
    )
    trainer.train()
    steps = [each for each in trainer.state.log_history if "loss" in each]
    print(json.dumps({"losses": [each["loss"] for each in steps], "steps": steps}))  # noqa: T201


if __name__ == "__main__":
    main()
