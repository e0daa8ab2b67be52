"""Write what transformers' own generate says after each prompt alone.

A process of its own, as torch's threads and a browser's loop would share one else.
"""

import json
import sys
from pathlib import Path

import torch

from runners.jobs.loading import load_folder, load_tokenizer


def greedy_texts(folder: Path, prompts: list[str], output_tokens: int) -> list[str]:
    """Return the greedy continuation of each prompt, by its end token or ``output_tokens``."""
    model, tokenizer = load_folder(folder, "fp32", torch.device("cpu")), load_tokenizer(folder)
    found = []
    for prompt in prompts:
        asked = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**asked, max_new_tokens=output_tokens, do_sample=False)
        answer = ids[0, asked["input_ids"].shape[1] :]
        found.append(tokenizer.decode(answer, skip_special_tokens=True))
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(greedy_texts(Path(sys.argv[1]), **json.load(sys.stdin))))
