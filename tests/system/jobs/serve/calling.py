"""A tiny model that has learnt one conversation by heart, with a call of a tool in it."""

from pathlib import Path
from typing import Any

import torch

from runners.jobs.loading import load_folder, load_tokenizer
from tests.hub.models import make_model

TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {% for tool in tools %}{{ tool.function.name }} "
    "{% endfor %}. Write <tool_call>{name, arguments}</tool_call>.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"name": "weather", "arguments": {"city": "Rome"}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "How is Rome?"},
    {"role": "assistant", "content": "I look.",
     "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "content": "sunny"},
    {"role": "assistant", "content": "It is sunny."},
]  # fmt: skip
MOST_STEPS = 400
LEARNT_LOSS = 0.005  # nats a token: greedy decoding repeats the conversation


def make_calling_model(folder: Path) -> Path:
    """Write a llama that answers the conversation's turns, whatever weights it began with."""
    make_model(folder, "llama")
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(str(folder))
    text = tokenizer.apply_chat_template(CONVERSATION, tools=[TOOL], tokenize=False)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    model = load_folder(folder, "fp32", torch.device("cpu")).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    for _ in range(MOST_STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if float(loss) < LEARNT_LOSS:
            break
    assert float(loss) < LEARNT_LOSS, "the conversation is not learnt"
    model.eval().save_pretrained(str(folder))
    return folder
