"""How long a verdict took, by part."""

import argparse
import json
import time

import pytest

from harness.command_verify import report
from harness.domains import judge_with_domain
from harness.spent import collecting, rows, spent
from optimized.change import Contract
from tests.harness.judged import change, changed, toy


def test_parts_add_up() -> None:
    with collecting() as seconds, spent("all"):
        for _ in range(2):
            with spent("all: sleep"):
                time.sleep(0.02)
        spent("all: call")(time.sleep)(0.01)
    assert seconds["all: sleep"] >= 0.04 and seconds["all: call"] >= 0.01
    assert seconds["all"] >= seconds["all: sleep"] + seconds["all: call"]
    found = dict(rows(seconds))
    assert list(found) == ["all", "all: sleep", "all: call", "all: rest"]
    assert found["all"] == pytest.approx(sum(list(found.values())[1:]))


def test_nothing_is_counted_for_nobody() -> None:
    with spent("before"):
        pass
    with collecting() as seconds:
        pass
    with spent("after"):
        pass
    assert seconds == {}


def test_a_verdict_s_parts_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    made = change("linear", lambda node: node.forward, Contract(numerics="reduction"))
    with collecting() as seconds:
        verdict = judge_with_domain(
            toy().model, changed(toy(), made), made, "torch", toy(), 1, targets=("decode-bs1",)
        )
    parts = "recording calls", "replays and noise", "the candidate", "timed steps", "rest"
    found = dict(rows(seconds))
    assert {f"region: {part}" for part in parts} <= found.keys()
    assert 0 < max(found.values()) == found["region"]
    a = argparse.Namespace(json=False, time=True)
    assert report(a, "linear", "torch", [verdict], None, seconds) == 0
    table = capsys.readouterr().out.partition("what that took\n")[2].splitlines()
    assert table[0].split() == ["part", "seconds"]
    assert table[1].split() == ["region", f"{found['region']:.1f}"]
    a.json = True
    report(a, "linear", "torch", [verdict], None, seconds)
    kept = json.loads(capsys.readouterr().out)["seconds"]
    assert kept == {part: round(value, 3) for part, value in found.items()}
