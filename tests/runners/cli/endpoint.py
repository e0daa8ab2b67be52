"""An OpenAI-compatible endpoint over HTTP whose delays, tokens and failures are known."""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Endpoint(ThreadingHTTPServer):
    """Serves on the loopback; a prompt has two tokens a word and four of its own."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, **changes) -> None:
        self.ttft_seconds, self.itl_seconds = 0.05, 0.02
        self.models, self.key, self.code = ["demo"], "", "queue_full"
        self.path = "/v1/completions"
        self.reports_usage = True
        self.failing = lambda _number: None  # number of a request -> status of its refusal
        self.answered = lambda _number: None  # called after each answer
        self.prompts: list[str] = []
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()
        vars(self).update(changes)
        super().__init__(("127.0.0.1", 0), Answer)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    """One request to it."""

    server: Endpoint

    def log_message(self, *_):
        pass

    def refuse(self, status, message, code):
        body = json.dumps({"error": {"message": message, "code": code}}).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def is_known(self):
        if self.server.key in {"", self.headers.get("authorization", "").removeprefix("Bearer ")}:
            return True
        self.refuse(401, f"Unknown key {self.headers.get('authorization')}", None)
        return False

    def do_GET(self):
        if self.is_known():
            body = json.dumps({"data": [{"id": each} for each in self.server.models]}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self.is_known():
            return
        if self.path != self.server.path:
            self.refuse(404, f"No {self.path}", "not_found")
            return
        server, is_chat = self.server, "messages" in body
        prompt = body["messages"][0]["content"] if is_chat else body["prompt"]
        with server.lock:
            server.prompts.append(prompt)
            number = len(server.prompts)
            server.in_flight += 1
            server.most_in_flight = max(server.most_in_flight, server.in_flight)
        try:
            if status := server.failing(number):
                self.refuse(status, f"Refused for {self.headers['authorization']}", server.code)
            else:
                self.stream(body, is_chat=is_chat, input_tokens=2 * len(prompt.split()) + 4)
        finally:
            with server.lock:
                server.in_flight -= 1
        server.answered(number)

    def stream(self, body, *, is_chat, input_tokens):
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        if is_chat:
            self.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for at in range(body["max_tokens"]):
            time.sleep(self.server.itl_seconds if at else self.server.ttft_seconds)
            self.event({"choices": [{"delta": {"content": "a"}} if is_chat else {"text": "a"}]})
        usage = {"prompt_tokens": input_tokens, "completion_tokens": body["max_tokens"]}
        self.event({"choices": [], "usage": usage if self.server.reports_usage else None})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, document):
        self.wfile.write(b"data: " + json.dumps(document).encode() + b"\n\n")


@contextlib.contextmanager
def serving(**changes):
    """Serve while the block runs; yield the endpoint."""
    endpoint = Endpoint(**changes)
    thread = threading.Thread(target=endpoint.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield endpoint
    finally:
        endpoint.shutdown()
        endpoint.server_close()
        thread.join()
