"""A model that calls one tool whatever it reads, made without training."""

import json
from pathlib import Path

import torch

from runners.jobs.loading import load_folder, load_tokenizer
from tests.hub.models import make_model, write_files
from tests.system.jobs.serve.calling import TEMPLATE

POSITIONS = 16_384  # what a coding agent sends, and a long loop
TOOL, ARGUMENTS = "look", {"at": 1}
CALL = f"<tool_call>\n{json.dumps({'name': TOOL, 'arguments': ARGUMENTS})}\n</tool_call>"
PRESENT = 4.0  # of a state that says something, beside entries of some 0.02
CALLED, ENDED = 2.0, 5.0  # of the logits: after any token the call, after a call the end
POOLING = {
    "modules.json": json.dumps(
        [{"type": f"sentence_transformers.models.{each}"} for each in ("Transformer", "Pooling")]
        + [{"type": "sentence_transformers.models.Normalize"}]
    ),
    "1_Pooling/config.json": json.dumps({"pooling_mode_lasttoken": True}),
}


def make_caller(folder: Path) -> Path:
    """Write a llama whose answer is a call, which is one token, and its end.

    Two entries of the states decide that, so greedy and drawn answers are the same: the first is
    there after each token, the second after the call. Held to another text, it writes any.
    """
    make_model(folder, "llama")
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.add_tokens([CALL])
    tokenizer.save_pretrained(str(folder))
    model = load_folder(folder, "bf16", torch.device("cpu"))
    model.config.max_position_embeddings = POSITIONS
    call, end = tokenizer.convert_tokens_to_ids(CALL), tokenizer.eos_token_id
    states, logits = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        states[:, 0], states[call, 1] = PRESENT, PRESENT
        logits[:, :2] = 0.0
        logits[call, 0], logits[end, 1] = CALLED, ENDED
    model.save_pretrained(str(folder))
    write_files(folder, POOLING)
    return folder
