"""An HTTP server that is started and asked as SGLang is: its arguments, key, health and figures.

It answers with what it was asked, so that a test sees what reached it; it writes no model's text.
"""

import argparse
import json
import os
import sys
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.runners.jobs.serve.standin.answering import Answering, answer_for_good

FLAGS = ("enable-metrics", "enable-lora", "disable-radix-cache", "enable-cache-report")
FIGURES = """sglang:num_running_reqs{{model_name="m"}} 0.0
sglang:num_queue_reqs{{model_name="m"}} 0.0
sglang:token_usage{{model_name="m"}} 0.25
sglang:prompt_tokens_total{{model_name="m"}} {prompt}
sglang:generation_tokens_total{{model_name="m"}} {output}
"""


def parsed(argv: list[str]) -> argparse.Namespace:
    """Return the arguments; exit with a word on those that SGLang has not."""
    parser = argparse.ArgumentParser()
    for name in os.environ["SGLANG_OPTIONS"].split():
        how: dict[str, Any] = {"nargs": "*"} if name == "lora-paths" else {}
        parser.add_argument(f"--{name}", **({"action": "store_true"} if name in FLAGS else how))
    return parser.parse_args(argv)


class Handler(Answering, BaseHTTPRequestHandler):
    """Answers as SGLang's own server does."""

    told: argparse.Namespace
    counts = {"prompt": 0, "output": 0}

    def do_GET(self) -> None:
        """Answer what needs no key: health and figures; and the list of models."""
        if self.path == "/health":
            self.say(200, {})
        elif self.path == "/metrics":
            self.say(200, FIGURES.format(**self.counts))
        else:
            length = int(self.told.context_length)
            card = {"id": self.told.served_model_name, "max_model_len": length}
            self.say(200, {"data": [card]})

    def do_POST(self) -> None:
        """Echo a prompt word by word, with the model that was asked for."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {self.told.api_key}":
            self.say(401, {"error": "Unauthorized"})
            return
        words = asked["prompt"].split()
        self.counts["prompt"] += len(words)
        self.counts["output"] += len(words)
        if "too long" in asked["prompt"]:
            said = "Requested token count exceeds the model's maximum context length of 64 tokens."
            self.say(400, {"object": "error", "message": said, "code": 400})
        elif asked.get("stream"):
            self.stream(asked["model"], words)
        else:
            choice = {"index": 0, "text": " ".join(words), "finish_reason": "length"}
            usage = {"prompt_tokens": len(words), "completion_tokens": len(words),
                     "total_tokens": 2 * len(words)}  # fmt: skip
            self.say(200, document(asked["model"], choice) | {"usage": usage})

    def stream(self, model: str, words: list[str]) -> None:
        """Send a word an event."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for word in words:
            choice = {"index": 0, "text": f"{word} ", "finish_reason": None}
            self.wfile.write(f"data: {json.dumps(document(model, choice))}\n\n".encode())
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")


def document(model: str, choice: dict[str, Any]) -> dict[str, Any]:
    """Return an answer in OpenAI's form."""
    base = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": model}
    return base | {"choices": [choice]}


if __name__ == "__main__":
    Handler.told = parsed(sys.argv[1:])
    answer_for_good(Handler, Handler.told)
