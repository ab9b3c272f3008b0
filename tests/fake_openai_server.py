"""A server with the part of the OpenAI API that the benchmark uses: streamed answers, models, a metrics page."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VLLM_PAGE = """\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{model_name="m"}} {drafts}
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{{model_name="m"}} {drafted}
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{{model_name="m"}} {accepted}
"""


class FakeServer:
    """Answers have `max_tokens` tokens, `seconds_per_token` apart; with `pairs`, two tokens at a time."""

    def __init__(self, *, seconds_per_token: float = 0.001, pairs: bool = False, page: str = VLLM_PAGE) -> None:
        self.seconds_per_token, self.pairs, self.page = seconds_per_token, pairs, page
        self.bodies: list[dict[str, Any]] = []
        self.drafts = 0
        self.fail_next = 0
        self.break_next = 0
        self.num_running = self.most_running = 0
        self.resets = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                counts = {"drafts": outer.drafts, "drafted": 2 * outer.drafts, "accepted": outer.drafts}
                pages = {"/v1/models": '{"data": [{"id": "m"}]}', "/metrics": outer.page.format(**counts)}
                self._reply(200 if self.path in pages else 404, pages.get(self.path, ""))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
                if self.path == "/reset_prefix_cache":
                    outer.resets += 1
                    self._reply(200, "{}")
                elif self.path == "/v1/chat/completions":
                    outer._answer(self, body)
                else:
                    self._reply(404, "{}")

            def _reply(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def _answer(self, handler: Any, body: dict[str, Any]) -> None:
        self.bodies.append(body)
        if self.fail_next:
            self.fail_next -= 1
            handler._reply(503, '{"error": {"message": "too busy"}}')
            return
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        handler.send_response(200)
        handler.end_headers()
        wanted, num_sent = body["max_tokens"], 0
        while num_sent < wanted:
            time.sleep(self.seconds_per_token)
            num_new = min(2 if self.pairs else 1, wanted - num_sent)
            num_sent += num_new
            self.drafts += self.pairs
            self._send(
                handler, {"choices": [{"index": 0, "delta": {"content": "ab" * num_new}, "finish_reason": None}]}
            )
            if self.break_next and num_sent > 2:
                self.break_next -= 1
                self._send(handler, {"error": {"message": "lost"}})
                self.num_running -= 1
                return
        self._send(handler, {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        self._send(handler, {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": num_sent}})
        handler.wfile.write(b"data: [DONE]\n\n")
        self.num_running -= 1

    @staticmethod
    def _send(handler: Any, chunk: dict[str, Any]) -> None:
        handler.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
