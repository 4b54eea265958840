"""The line to the Messages API, against a local server: the real SDK over real sockets."""

import time
from itertools import pairwise
from typing import Any

import pytest

from agents.claude.line import KEYS, MOST_LOST, AskAgain, Line, NoAnswer
from agents.claude.received import MALFORMED
from agents.claude.spend import PRICES, Purse, Spent
from harness.errors import UserError
from tests.agents.fake_api import KEY, FakeApi, Step, call, say

REQUEST: dict[str, Any] = {
    "model": "claude-opus-5-5",
    "max_tokens": 1000,
    "messages": [{"role": "user", "content": "hello"}],
}
HELLO = Step([say("a longer text that comes in more than one piece of forty letters")], "end_turn")


@pytest.fixture(scope="module")
def spoken():
    """Asks a scripted server once; the answer (or what went wrong), what was heard, the server."""
    heard: list[dict[str, Any]] = []
    with FakeApi() as api, pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANTHROPIC_API_KEY", KEY)
        patch.setenv("ANTHROPIC_BASE_URL", api.url)
        line = Line(heard.append, 0.02)

        def spoken(*steps: Step, patience_s: float = 20.0):
            heard.clear()
            api.play(*steps)
            while True:
                try:
                    return line.ask(REQUEST, patience_s), heard, api
                except AskAgain:
                    continue
                except NoAnswer as error:
                    return str(error), heard, api

        yield spoken
        line.close()


def retries(heard: list[dict[str, Any]]) -> list[str]:
    return [told["retry"] for told in heard if "retry" in told]


def test_an_answer_is_put_together_from_its_stream(spoken) -> None:
    thought = {"type": "thinking", "thinking": "let me see, " * 9, "signature": "s" * 90}
    broken = call("write_change", raw='{"file": "a.py", "text": ')
    step = Step(
        [thought, say("first " * 20), call("verify", file="a.py"), broken],
        usage={"cache_read_input_tokens": 7000, "output_tokens": 321},
    )
    message, _, api = spoken(step)
    *content, last = message["content"]
    assert content[0] == thought
    assert content[1] == {"type": "text", "text": "first " * 20}
    assert (content[2]["name"], content[2]["input"]) == ("verify", {"file": "a.py"})
    assert last["input"] == {} and message[MALFORMED] == {last["id"]: broken["raw"]}
    assert message["stop_reason"] == "tool_use"
    spent = Spent.of(message["usage"])
    assert spent == Spent(input=100, output=321, cache_read=7000)
    assert api.headers[0]["authorization"] == f"Bearer {KEY}"
    assert api.asked[0]["messages"] == REQUEST["messages"] and api.asked[0]["stream"] is True


def test_retry_after_is_honoured(spoken) -> None:
    begun = time.monotonic()
    limited = Step(status=429, kind="rate_limit_error", headers={"retry-after": "0.7"})
    message, heard, api = spoken(limited, HELLO)
    assert time.monotonic() - begun > 0.7
    assert message["content"][0]["text"] == HELLO.content[0]["text"]
    assert retries(heard) == ["429 rate_limit_error: rate_limit_error by script"]
    assert [told["wait_s"] for told in heard if "retry" in told] == [0.7]
    assert len(api.asked) == 2


def test_an_overloaded_service_and_broken_connections_are_asked_again(spoken) -> None:
    steps = (
        Step(status=529, kind="overloaded_error"),
        Step(status=500, kind="api_error"),
        Step(HELLO.content, cut=3),
        Step(HELLO.content, broken="overloaded_error"),
        Step(HELLO.content, cut=0),
        HELLO,
    )
    message, heard, api = spoken(*steps)
    assert message["content"] == [say(HELLO.content[0]["text"])]
    first, second, third, fourth, fifth = retries(heard)
    assert first == "529 overloaded_error: overloaded_error by script"
    assert second == "500 api_error: api_error by script"
    assert fourth == "200 overloaded_error: overloaded_error by script"
    assert all(text.startswith("the connection broke (") for text in (third, fifth))
    lost = [Spent.of(told["usage"]) for told in heard if "retry" in told]
    assert lost[:2] == [Spent(), Spent()]
    assert lost[2].input == 100 and lost[2].output >= 40  # what came is counted, a token a byte
    assert [told["sent"] for told in heard if "retry" in told] == [False, False, True, True, True]
    assert [told["partial"] for told in heard if "retry" in told][2:] == [
        [say(HELLO.content[0]["text"][:40])], [], []
    ]  # fmt: skip
    assert len(api.asked) == 6


def test_answers_that_break_off_are_waited_for_longer_each_time_and_not_for_ever(spoken) -> None:
    said, heard, api = spoken(*[Step(HELLO.content, cut=3)] * (MOST_LOST + 2))
    assert said.startswith(f"the Messages API at {api.url}: the connection broke (")
    assert said.endswith(f"; tried {MOST_LOST} time(s)") and len(api.asked) == MOST_LOST
    *waits, last = [told["wait_s"] for told in heard if "retry" in told]
    assert last is None and all(later > 1.4 * wait for wait, later in pairwise(waits))
    assert sum(Spent.of(told["usage"]).input for told in heard if "retry" in told) == 800


def test_patience_ends_and_a_bad_request_is_not_repeated(spoken) -> None:
    busy = Step(status=529, kind="overloaded_error")
    said, _, api = spoken(busy, HELLO, patience_s=0.0)
    assert said.startswith(f"the Messages API at {api.url}")
    assert said.endswith("529 overloaded_error: overloaded_error by script; tried 1 time(s)")
    said, _, api = spoken(Step(status=401, kind="authentication_error"), HELLO)
    assert "401 authentication_error" in said and len(api.asked) == 1
    assert KEY not in said


def test_without_a_key_there_is_no_line(monkeypatch) -> None:
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="no key for the Messages API; set ANTHROPIC_API_KEY"):
        Line(lambda told: None)


def test_a_purse_lets_out_only_what_surely_fits() -> None:
    purse = Purse(model="claude-opus-5-5", most_usd=0.10)
    assert purse.output_left(prompt=10_000) == 2500  # $0.05 at $5 written, the rest at $20
    purse.spent += Spent(input=5_000, cache_read=100_000, output=1_000)
    assert purse.spent.usd(PRICES["claude-opus-5-5"]) == pytest.approx(0.02 + 0.02 + 0.02)
    assert purse.output_left(prompt=2_000) == 1500
    assert purse.output_left(prompt=5_000) == 0  # fewer tokens than an answer needs
    assert purse.describe().startswith("106,000 tokens (5,000 new,")
    assert purse.describe().endswith("$0.0600 at the prices of October 2026")
    tokens = Purse(model="some-other", most_tokens=20_000, spent=Spent(input=5_000))
    assert tokens.output_left(prompt=13_000) == 2_000
    assert tokens.describe().endswith("no price of some-other is known here")
    with pytest.raises(UserError, match="the price of some-other is not known here"):
        Purse(model="some-other", most_usd=1.0)
    with pytest.raises(UserError, match="--budget-usd or --budget-tokens"):
        Purse(model="claude-opus-5-5")
