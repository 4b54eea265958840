"""A local HTTP server that speaks the Messages API as its script says: one step for each request.

A step is the content of an answer (`say`, `call`), or one of the things that go wrong. `asked` are
the requests that came. Answers are streamed as server-sent events, in small pieces.
"""

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "sk-test-not-a-real-key"
PIECE = 40  # letters of a delta


@dataclass(frozen=True)
class Step:
    """One answer. `status` other than 200 is an error of `kind`; `cut` breaks the connection off
    after so many events; `broken` sends an error event after the first."""

    content: Sequence[dict[str, Any]] = ()
    stop: str = "tool_use"
    status: int = 200
    kind: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    broken: str = ""
    usage: dict[str, int] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


def say(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def call(name: str, raw: str | None = None, **given: Any) -> dict[str, Any]:
    """A tool call; `raw` replaces its input's JSON."""
    return {"type": "tool_use", "name": name, "input": given, "raw": raw}


def calls(name: str, **given: Any) -> Step:
    return Step([call(name, **given)])


class FakeApi:
    """Use as a context manager; `url` is its address."""

    def __init__(self, *steps: Step) -> None:
        self.play(*steps)
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                api.headers.append({k.lower(): v for k, v in self.headers.items()})
                number = len(api.asked)
                api.asked.append(json.loads(body))
                step = api.steps[number] if number < len(api.steps) else Step(status=500)
                (api.fail if step.status != 200 else api.stream)(self, step, number)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def play(self, *steps: Step) -> None:
        """Begin anew with this script."""
        self.steps = list(steps)
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []

    def __enter__(self) -> "FakeApi":
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def fail(self, handler: BaseHTTPRequestHandler, step: Step, _number: int) -> None:
        body = json.dumps(error_body(step.kind)).encode()
        handler.send_response(step.status)
        for name, value in {**step.headers, "content-type": "application/json"}.items():
            handler.send_header(name, value)
        handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def stream(self, handler: BaseHTTPRequestHandler, step: Step, number: int) -> None:
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream")
        handler.send_header("connection", "close")
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()
        for index, event in enumerate(events(step, number, self.asked[number]["model"])):
            if index == step.cut:
                handler.close_connection = True
                handler.wfile.flush()
                handler.connection.close()
                return
            if step.broken and index == 1:
                event = error_body(step.broken)
            data = f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            handler.wfile.flush()
            if step.broken and index == 1:
                break
        handler.wfile.write(b"0\r\n\r\n")
        handler.close_connection = True


def error_body(kind: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": f"{kind} by script"}}


def events(step: Step, number: int, model: str) -> Iterator[dict[str, Any]]:
    usage = {"input_tokens": 100, "output_tokens": 1, **step.usage}
    message = {
        "id": f"msg_{number}", "type": "message", "role": "assistant", "model": model,
        "content": [], "stop_reason": None, "stop_sequence": None,
        "usage": {**usage, "output_tokens": 1},
    }  # fmt: skip
    yield {"type": "message_start", "message": message}
    for index, block in enumerate(step.content):
        yield from block_events(index, block, f"toolu_{number}_{index}")
    delta: dict[str, Any] = {"stop_reason": step.stop, "stop_sequence": None}
    if step.details:
        delta["stop_details"] = step.details
    total = {"output_tokens": step.usage.get("output_tokens", 50)}
    yield {"type": "message_delta", "delta": delta, "usage": total}
    yield {"type": "message_stop"}


def block_events(index: int, block: dict[str, Any], call_id: str) -> Iterator[dict[str, Any]]:
    kind = block["type"]
    if kind == "text":
        start, text, delta = {"type": "text", "text": ""}, block["text"], "text"
    elif kind == "thinking":
        start, text, delta = {**block, "thinking": ""}, block["thinking"], "thinking"
    else:
        text = block["raw"] if block["raw"] is not None else json.dumps(block["input"])
        start = {"type": "tool_use", "id": call_id, "name": block["name"], "input": {}}
        delta = "partial_json"
    yield {"type": "content_block_start", "index": index, "content_block": start}
    for at in range(0, len(text), PIECE):
        piece = {"type": {"partial_json": "input_json_delta"}.get(delta, f"{delta}_delta")}
        piece[delta] = text[at : at + PIECE]
        yield {"type": "content_block_delta", "index": index, "delta": piece}
    yield {"type": "content_block_stop", "index": index}
