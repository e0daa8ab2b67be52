"""An HTTP server that is started and asked as vLLM is: arguments, key, health, figures, caches.

It answers with the words of what it was asked, so that a test sees what reached it; it writes no
model's text. Whatever vLLM would refuse of a divided request, it refuses: see ``checked``.
"""

import argparse
import json
import os
import sys
import time
import uuid
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.runners.jobs.serve.standin.answering import Answering, answer_for_good
from tests.runners.jobs.serve.standin.vllm.cache import Caches, RefusedError, fetch

FLAGS = (
    "disable-uvicorn-access-log", "enable-chunked-prefill", "no-enable-chunked-prefill",
    "enable-prefix-caching", "no-enable-prefix-caching", "enable-expert-parallel", "enable-lora",
    "enable-prompt-tokens-details", "enable-auto-tool-choice",
)  # fmt: skip
SLOWLY = 0.1
FIGURES = """# HELP vllm:num_requests_running Requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0"}} {running}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0"}} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0"}} {used}
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{engine="0"}} {prompt}
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0"}} {output}
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.001"}} {asked}
vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf"}} {asked}
vllm:time_to_first_token_seconds_count{{engine="0"}} {asked}
vllm:time_to_first_token_seconds_sum{{engine="0"}} 0.0
# TYPE vllm:inter_token_latency_seconds histogram
vllm:inter_token_latency_seconds_bucket{{engine="0",le="0.1"}} {later}
vllm:inter_token_latency_seconds_bucket{{engine="0",le="+Inf"}} {later}
vllm:inter_token_latency_seconds_count{{engine="0"}} {later}
vllm:inter_token_latency_seconds_sum{{engine="0"}} {later_seconds}
# TYPE standin:fetched_total counter
standin:fetched_total {fetched}
# TYPE standin:prompts_read_total counter
standin:prompts_read_total {read}
"""


def parsed(argv: list[str]) -> argparse.Namespace:
    """Return the arguments; exit with a word on those that vLLM has not."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    for name in os.environ["VLLM_OPTIONS"].split():
        how: dict[str, Any] = {"nargs": "*"} if name == "lora-modules" else {}
        parser.add_argument(f"--{name}", **({"action": "store_true"} if name in FLAGS else how))
    return parser.parse_args(argv)


class Engine:
    """What one process has: its part, its caches, its counts."""

    def __init__(self, told: argparse.Namespace) -> None:
        self.told = told
        transfer = json.loads(told.kv_transfer_config or "{}")
        self.role = transfer.get("kv_role", "")
        self.caches: Caches | None = None
        if transfer:
            assert transfer["kv_connector"] == "NixlConnector", transfer
            host = os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"]
            self.caches = Caches(host, int(os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"]))
        names = ("running", "prompt", "output", "asked", "later", "read")
        self.counts = dict.fromkeys(names, 0)

    def page(self) -> str:
        """Return its figures."""
        held = self.caches.blocks_held if self.caches else 0
        fetched = self.caches.fetched if self.caches else 0
        own = {"used": held / 100, "fetched": fetched, "later_seconds": self.counts["later"] / 100}
        return FIGURES.format(**self.counts, **own)

    def checked(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return what is asked of a transfer, refused where vLLM's own would go wrong."""
        params = asked.get("kv_transfer_params") or {}
        if params and self.caches is None:
            raise RefusedError("no connector is configured")
        if params.get("do_remote_decode"):
            whole = (asked.get("max_tokens"), asked.get("stream", False), asked.get("n", 1))
            if self.role != "kv_producer" or whole != (1, False, 1) or "min_tokens" in asked:
                raise RefusedError(f"a prompt is read for one token in one piece, not {whole}")
            if asked.get("tool_choice") not in {None, "none", "auto"}:
                raise RefusedError("one token is no whole call of a tool")
        elif params and (self.role != "kv_consumer" or not params.get("do_remote_prefill")):
            raise RefusedError("this engine fetches no cache")
        elif params and asked.get("n", 1) != 1:
            raise RefusedError("a cache is gone once the first answer fetched it")
        return params

    def words_of(self, asked: dict[str, Any], params: dict[str, Any]) -> list[str]:
        """Return the prompt's words: fetched from who read them, else read here."""
        texts = [each["content"] for each in asked.get("messages", [])] or [asked["prompt"]]
        own = [
            str(word)
            for text in texts
            for word in (text.split() if isinstance(text, str) else text)  # or tokens
        ]
        if params.get("do_remote_prefill"):
            if "refused late" in " ".join(own):
                fetch(params, only_free=True)
                raise RefusedError("this model's maximum context length is 8 tokens")
            if (found := fetch(params)) != own:
                raise RefusedError(f"the cache is of {found}, not of {own}")
            return found
        self.counts["read"] += 1
        return own


class Handler(Answering, BaseHTTPRequestHandler):
    """Answers as vLLM's own server does."""

    engine: Engine
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer what needs no key: health and figures; and the list of models."""
        if self.path == "/health":
            self.say(200, {})
        elif self.path == "/metrics":
            self.say(200, self.engine.page())
        elif self.path == "/v1/rerank":
            self.say(405, {"error": "Method Not Allowed"})
        else:
            length = int(self.engine.told.max_model_len)
            self.say(200, {"data": [{"id": "m", "max_model_len": length}]})

    def do_POST(self) -> None:
        """Answer a prompt with its own words, as many as may be written."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {os.environ['VLLM_API_KEY']}":
            self.say(401, {"error": "Unauthorized"})
            return
        counts = self.engine.counts
        counts["running"] += 1
        try:
            (self.rank if self.path == "/v1/rerank" else self.answer)(asked)
        except RefusedError as error:
            is_long = "maximum context length" in str(error)
            document = {"message": str(error), "type": "BadRequestError", "param": None}
            self.say(400 if is_long else 500, {"error": document})
        finally:
            counts["running"] -= 1

    def answer(self, asked: dict[str, Any]) -> None:
        """Count a request and answer it, whole or streamed."""
        params = self.engine.checked(asked)
        prompt = self.engine.words_of(asked, params)
        if "refused early" in " ".join(prompt):
            raise RefusedError("this model's maximum context length is 4 tokens")
        limit = asked.get("max_completion_tokens") or asked.get("max_tokens") or len(prompt)
        words = [word for word in prompt if word not in (asked.get("stop") or [])][:limit]
        counts, times = self.engine.counts, asked.get("n", 1)
        counts["asked"] += 1
        counts["prompt"] += len(prompt)
        counts["later"] += (len(words) - 1) * times
        if params.get("do_remote_decode"):
            counts["output"] += len(words)
            kept = self.engine.caches.keep(f"cmpl-{uuid.uuid4()}", prompt)  # type: ignore[union-attr]
            self.say(200, self.whole(asked, prompt, words) | {"kv_transfer_params": kept})
        elif asked.get("stream"):
            self.stream(asked, prompt, words, is_slow="slowly" in prompt)
        else:
            time.sleep(SLOWLY * len(words) if "slowly" in prompt else 0)
            counts["output"] += len(words) * times
            self.say(200, self.whole(asked, prompt, words))

    def rank(self, asked: dict[str, Any]) -> None:
        """Rank documents by the words that they share with the query, as a reranker would."""
        query = set(asked["query"].split())
        if len(query) > 4:
            raise RefusedError("this model's maximum context length is 4 tokens")
        ranks = [
            {"index": at, "relevance_score": len(query & set(each.split())) / len(query),
             "document": {"text": each, "multi_modal": None}}
            for at, each in enumerate(asked["documents"])
        ]  # fmt: skip
        ranks.sort(key=lambda each: -each["relevance_score"])
        tokens = sum(len(f"{asked['query']} {each}".split()) for each in asked["documents"])
        used = {"prompt_tokens": tokens, "total_tokens": tokens}
        found = ranks[: asked["top_n"] or None]
        self.say(200, {"id": "score-1", "model": asked["model"], "usage": used, "results": found})

    def whole(self, asked: dict[str, Any], prompt: list[str], words: list[str]) -> dict[str, Any]:
        """Return an answer in one piece."""
        told = {"tokens": words, "token_logprobs": [-0.5] * len(words)}
        choices = [
            {"index": at, "finish_reason": "length", "text": " ".join(words),
             "message": {"role": "assistant", "content": " ".join(words)},
             "logprobs": told if asked.get("logprobs") else None}
            for at in range(asked.get("n", 1))
        ]  # fmt: skip
        usage = counts(prompt, len(words) * len(choices), has_details=True)
        return self.document(asked, choices) | {"usage": usage}

    def stream(
        self, asked: dict[str, Any], prompt: list[str], words: list[str], *, is_slow: bool
    ) -> None:
        """Send a word of each choice an event, with the counts that are asked for."""
        options, times = asked.get("stream_options") or {}, asked.get("n", 1)
        wants_last = bool(options.get("include_usage"))
        wants_each = wants_last and bool(options.get("continuous_usage_stats"))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number, word in enumerate(words, 1):
            time.sleep(SLOWLY if is_slow else 0)
            for at in range(times):
                choices = [{"index": at, "text": f"{word} ", "finish_reason": None,
                            "delta": {"content": f"{word} "}}]  # fmt: skip
                used = {"usage": counts(prompt, number)} if wants_each else {}
                self.event(json.dumps(self.document(asked, choices) | used))
                self.engine.counts["output"] += 1
        if wants_last:
            last = counts(prompt, len(words) * times, has_details=True)
            self.event(json.dumps(self.document(asked, []) | {"usage": last}))
        self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def event(self, text: str) -> None:
        """Send one event as a chunk of its own."""
        data = f"data: {text}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def document(self, asked: dict[str, Any], choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return an answer in OpenAI's form, with the engine that wrote it and its GPUs."""
        who = f"{self.engine.role or 'alone'} on {os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}"
        kind = "chat.completion" if "messages" in asked else "text_completion"
        base = {"id": "cmpl-1", "object": kind, "created": 1, "model": asked["model"]}
        return base | {"choices": choices, "system_fingerprint": who}

    def log_message(self, *_words: object) -> None:
        """Say nothing of each request, as it was told."""


def counts(prompt: list[str], output: int, *, has_details: bool = False) -> dict[str, Any]:
    """Return the token counts of an answer; the words ``cached`` were in the prefix cache."""
    used = {"prompt_tokens": len(prompt), "completion_tokens": output}
    used |= {"total_tokens": len(prompt) + output}
    details = {"prompt_tokens_details": {"cached_tokens": prompt.count("cached")}}
    return used | (details if has_details else {})


if __name__ == "__main__":
    Handler.engine = Engine(parsed(sys.argv[1:]))
    answer_for_good(Handler, Handler.engine.told)
