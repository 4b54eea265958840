"""The line to the Messages API: a process of its own, which alone has the key and the network.

The run's process hands it a request and hears from it, in lines of JSON: `alive` while it waits or
streams, `retry` with the reason, the wait and what came of the answer, then `message`, `again` or
`failed`. It asks again after 408, 409, 429, 5xx, an overloaded service and broken connections;
`retry-after` is honoured. An answer that broke off has cost something, and one that never came may
have, so whether to ask again is for the run to say.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from agents.claude import secrets
from agents.claude.received import Received
from harness.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
PATIENCE_S = 600.0  # for one answer, waits and tries together; the stream itself may take longer
SILENCE_S = 120.0  # of a stream: the service pings more often
BEAT_S = 5.0
AGAIN = 408, 409, 429
AGAIN_TYPES = "overloaded_error", "api_error", "rate_limit_error", "timeout_error"

MOST_LOST = 8  # answers in a row that broke off
ENDED = "the process that speaks to the Messages API has ended"
KEYS = "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"

Tell = Callable[..., None]


def require_key() -> None:
    """UserError where the environment had no key."""
    if not any(os.environ.get(name) or secrets.TAKEN.get(name) for name in KEYS):
        raise UserError(f"no key for the Messages API; set {KEYS[0]}")


class AskAgain(Exception):
    """The answer broke off; what it may have cost was told."""


class NoAnswer(UserError):
    """The service gave none, or refused to; `known`: all that it may have cost was told."""

    def __init__(self, text: str, *, known: bool) -> None:
        super().__init__(text)
        self.known = known


class Line:
    """The run's end. `hear` is told each `alive` and `retry`; `forgotten` are the variables that
    this process had and the other one has now."""

    def __init__(self, hear: Callable[[dict[str, Any]], None], first_wait_s: float = FIRST_WAIT_S):
        """UserError where there is no key. Secrets go by pipe: an environment can be looked at."""
        self.hear, self.first_wait_s = hear, first_wait_s
        self.lost = 0  # answers in a row
        require_key()
        secrets.take()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "agents.claude.line"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdin is not None
        secret = secrets.hand_over()
        self.process.stdin.write(json.dumps(secret) + "\n")
        self.process.stdin.flush()
        self.forgotten = tuple(sorted(secret))
        self.address = str(self._read()["ready"])

    def ask(self, request: dict[str, Any], patience_s: float = PATIENCE_S) -> dict[str, Any]:
        """The answer to a request; AskAgain if it broke off, NoAnswer if there is none."""
        order = {"request": request, "patience_s": patience_s, "lost": self.lost}
        order["first_wait_s"] = self.first_wait_s
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise NoAnswer(ENDED, known=False) from error
        while True:
            told = self._read()
            if "message" in told:
                self.lost = 0
                return told["message"]
            if "again" in told:
                self.lost += 1
                raise AskAgain
            if "failed" in told:
                self.lost = 0
                where = f"the Messages API at {self.address}"
                raise NoAnswer(f"{where}: {told['failed']}", known=True)
            self.hear(told)

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        if not text.endswith("\n"):
            raise NoAnswer(ENDED, known=False)
        return json.loads(text)

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.process.kill()
        self.process.wait()


def serve(orders: IO[str], tell: Tell) -> None:
    """Answer orders, after a first line with the secrets, until there are no more."""
    import anthropic

    os.environ.update(json.loads(orders.readline()))
    timeout = anthropic.Timeout(SILENCE_S, connect=10.0)
    client = anthropic.Anthropic(max_retries=0, timeout=timeout)
    tell(ready=str(client.base_url))
    for order in orders:
        answer(client, json.loads(order), tell)


def answer(client: Any, order: dict[str, Any], tell: Tell) -> None:
    """One answer, after as many tries as it takes and patience allows."""
    import anthropic
    import httpx2

    last = time.monotonic() + order["patience_s"]
    tries = order["lost"]  # each waits longer than the one before, whoever asks again
    while True:
        received, sent = Received(), False
        try:
            beat = 0.0
            with client.messages.create(**order["request"], stream=True) as stream:
                for event in stream:
                    received.take(event)
                    if time.monotonic() - beat > BEAT_S:
                        beat = time.monotonic()
                        tell(alive="the model answers")
            if received.complete:
                tell(message=received.message())
                return
            reason, wait_s, sent = "the answer broke off", None, True
        except anthropic.APIStatusError as error:
            reason, wait_s = describe(error), retry_after_s(error)
            if not worth_another(error):
                tell(failed=reason)
                return
        except (anthropic.APIConnectionError, httpx2.HTTPError, httpx2.StreamError) as error:
            reason, wait_s = f"the connection broke ({error or type(error).__name__})", None
            sent = not isinstance(error.__cause__, (httpx2.ConnectError, httpx2.ConnectTimeout))
        if wait_s is None:
            wait_s = min(LONGEST_WAIT_S, order["first_wait_s"] * 2**tries)
            wait_s *= 1 - random.random() / 4
        tries += 1
        broke_off = sent or bool(received.usage)
        ends = time.monotonic() + wait_s > last or (broke_off and order["lost"] + 1 >= MOST_LOST)
        told = {"usage": received.lost_usage(), "sent": broke_off, "partial": received.content}
        tell(retry=reason, wait_s=None if ends else round(wait_s, 2), **told)
        if ends:
            tell(failed=f"{reason}; tried {tries} time(s)")
            return
        wait(wait_s, tell)
        if broke_off:
            tell(again=True)
            return


def wait(seconds: float, tell: Tell) -> None:
    last = time.monotonic() + seconds
    while (left := last - time.monotonic()) > 0:
        time.sleep(min(left, BEAT_S))
        tell(alive="waiting before another try")


def worth_another(error: Any) -> bool:
    """By its status, or, of an error in the middle of a stream, by its type."""
    status = error.status_code
    return status in AGAIN or status >= 500 or error_type(error) in AGAIN_TYPES


def error_type(error: Any) -> str:
    body = error.body if isinstance(error.body, dict) else {}
    inner = body.get("error")
    return str(inner.get("type")) if isinstance(inner, dict) else ""


def describe(error: Any) -> str:
    body = error.body if isinstance(error.body, dict) else {}
    inner = body.get("error")
    text = inner.get("message") if isinstance(inner, dict) else None
    said = " ".join(str(text or error.message).split())[:500]
    return f"{error.status_code} {error_type(error)}: {said}".replace(" : ", ": ")


def retry_after_s(error: Any) -> float | None:
    """What the answer's header asks for, seconds."""
    for name, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            return max(0.0, float(error.response.headers[name]) * scale)
        except (KeyError, ValueError):
            continue
    return None


def main() -> None:
    def tell(**facts: Any) -> None:
        print(json.dumps(facts), flush=True)

    try:
        serve(sys.stdin, tell)
    except BrokenPipeError:
        os._exit(0)  # the run has ended
    except KeyboardInterrupt:
        os._exit(130)


if __name__ == "__main__":
    main()
