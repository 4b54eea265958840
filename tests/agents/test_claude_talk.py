"""The conversation with a scripted model over real sockets; the tools give fixed answers."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from agents.budget import Budget, BudgetSpent
from agents.claude.line import Line, NoAnswer
from agents.claude.spend import MOST_OUTPUT, Purse, Spent
from agents.claude.talk import CUT, MOST_ANSWERS, NUDGE, Talk
from agents.claude.tools import TOOLS
from agents.claude.trajectory import Call, Trajectory
from harness.errors import UserError
from tests.agents.fake_api import KEY, FakeApi, Step, call, calls, say

LONG = "the first line\n" + "many more letters, " * 400


class Table:
    """Takes every file that is submitted; `outcomes` say what came of it."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.done: list[str] = []

    def prompt(self) -> str:
        return "make it faster"

    def do(self, call: Call) -> tuple[str, bool]:
        self.done.append(call.brief)
        return LONG if call.name == "layer_map" else f"{call.name} was done", False

    def take(self, call: Call) -> tuple[str | None, str]:
        return f"frozen-{call.input['file']}", call.input["hypothesis"]

    def decided(self, files: Sequence[str]) -> str | None:
        """Of one file its outcome, of more all of them in a line."""
        known = [self.outcomes.get(file) for file in files]
        return None if None in known else "; ".join(map(str, known))


@pytest.fixture(scope="module")
def api():
    with FakeApi() as api, pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANTHROPIC_API_KEY", KEY)
        patch.setenv("ANTHROPIC_BASE_URL", api.url)
        yield api


@pytest.fixture(scope="module")
def line(api):
    line = Line(lambda told: None, 0.01)
    yield line
    line.close()


@pytest.fixture
def begin(api, line, tmp_path):
    """Starts or continues a conversation; without steps the script goes on."""

    def begin(*steps: Step, tokens: int = 10**7, **more):
        if steps:
            api.play(*steps)
        settings = {"model": "claude-opus-5-5", "output_config": {"effort": "low"}}
        purse = Purse(model="claude-opus-5-5", most_tokens=tokens)
        table = more.pop("table", None) or Table()
        record = Trajectory(tmp_path / "trajectory.jsonl")
        budget = Budget(10.0)
        talk = Talk(line, table, record, "system", settings, purse=purse, budget=budget, **more)
        line.hear = lambda told: talk.note("retry", **told) if "retry" in told else None
        return talk, table

    return begin


def submits(name: str = "a.py") -> Step:
    return calls("submit", file=name, hypothesis="fewer launches")


def test_a_submission_waits_for_its_outcome_and_the_judges_words_go_back(begin, api) -> None:
    two = Step([say("look"), call("ceilings"), call("verify", file="a.py")])
    talk, table = begin(two, submits(), calls("give_up", reason="that was all"))
    assert talk.next() == [("frozen-a.py", "fewer launches")]
    assert table.done == ["ceilings()", "verify(file='a.py')"]
    assert talk.next() == [("frozen-a.py", "fewer launches")] and len(api.asked) == 2
    table.outcomes["frozen-a.py"] = "rejected: rounds to BF16 at `x`"
    assert talk.next() is None
    assert talk.said.ended == "the model gave up: that was all"
    first, second, third = api.asked
    assert first["system"][0]["cache_control"] == {"type": "ephemeral"} == first["cache_control"]
    assert first["tools"] == TOOLS and first["output_config"] == {"effort": "low"}
    assert first["messages"] == [{"role": "user", "content": "make it faster"}]
    results = second["messages"][2]["content"]
    assert [r["content"] for r in results] == ["ceilings was done", "verify was done"]
    assert [r["tool_use_id"] for r in results] == ["toolu_0_1", "toolu_0_2"]
    told = third["messages"][-1]["content"][0]
    assert told["content"] == "rejected: rounds to BF16 at `x`"
    assert talk.said.spent == Spent(input=300, output=150)


def test_a_conversation_goes_on_from_its_record_without_asking_again(begin, api) -> None:
    talk, table = begin(calls("ceilings"), submits(), calls("give_up", reason="done"))
    talk.next()
    record = talk.record.path
    for length in (len(record.read_bytes()) - 3, len(record.read_bytes())):
        record.write_bytes(record.read_bytes()[:length])  # as a kill leaves it
        again, table = begin()
        assert again.next() == [("frozen-a.py", "fewer launches")]
        assert table.done == [] and len(api.asked) == 2
    table.outcomes["frozen-a.py"] = "kept"
    assert again.next() is None and len(api.asked) == 3
    assert [e["kind"] for e in again.record.events()] == [
        *("began", "asked", "answer", "result", "asked", "answer", "submitted", "round", "result"),
        *("asked", "answer", "ended"),
    ]


def test_a_round_takes_several_candidates_and_is_decided_once_it_is_full(begin, api) -> None:
    """A repeated idea takes no place, and what follows the last one begins the next round."""
    both = Step([*submits("a-1.py").content, *submits("b-1.py").content])
    rest = Step([*submits("c-2.py").content, *submits("d-3.py").content])
    talk, table = begin(both, rest, calls("give_up", reason="done"), candidates=2)
    assert talk.next() == [("frozen-a-1.py", "fewer launches"), ("frozen-c-2.py", "fewer launches")]
    told = api.asked[1]["messages"][-1]["content"]
    assert told[0]["content"].startswith("candidate 1 of at most 2 in this round; submit another ")
    assert told[1]["content"].startswith("this round has the same idea already")
    assert [tool["name"] for tool in api.asked[0]["tools"]][-1] == "end_round"
    assert "takes up to 2 candidates" in api.asked[0]["messages"][0]["content"]
    table.outcomes |= {"frozen-a-1.py": "kept", "frozen-c-2.py": "rejected"}
    again, _ = begin(table=table, candidates=2)  # as after a kill
    assert again.next() == [("frozen-d-3.py", "fewer launches")] and len(api.asked) == 3
    told = api.asked[2]["messages"][-1]["content"]
    assert told[0]["content"] == "kept; rejected"
    assert told[1]["content"].startswith("candidate 1 of at most 2")
    assert (
        again.said.ended == "the model gave up: done"
    )  # its last candidate is decided all the same
    table.outcomes["frozen-d-3.py"] = "kept"
    assert again.next() is None
    rounds = [e["files"] for e in again.record.events() if e["kind"] == "round"]
    assert rounds == [["frozen-a-1.py", "frozen-c-2.py"], ["frozen-d-3.py"]]


def test_the_model_may_end_a_round_before_it_is_full(begin, api) -> None:
    early = Step([call("end_round"), *submits().content, call("end_round")])
    talk, table = begin(early, calls("give_up", reason="done"), candidates=3)
    assert talk.next() == [("frozen-a.py", "fewer launches")]
    table.outcomes["frozen-a.py"] = "rejected: too slow"
    assert talk.next() is None
    told = api.asked[1]["messages"][-1]["content"]
    assert told[0]["is_error"] and told[0]["content"] == "nothing was submitted in this round"
    assert told[2]["content"] == "rejected: too slow"


def test_what_was_submitted_is_decided_before_a_budget_ends_it(begin, api) -> None:
    dear = Step(submits().content, usage={"input_tokens": 30_000})
    talk, table = begin(dear, calls("give_up", reason="done"), tokens=35_000, candidates=3)
    assert talk.next() == [("frozen-a.py", "fewer launches")]
    table.outcomes["frozen-a.py"] = "kept"
    with pytest.raises(BudgetSpent, match="is left of 35,000 tokens"):
        talk.next()
    again, _ = begin(tokens=10**6, table=table, candidates=3)
    assert again.next() is None  # the model is told what came of its round
    assert api.asked[1]["messages"][-1] == {"role": "user", "content": "kept"}


WRONG = {
    "malformed": (call("verify", raw='{"file": '), "the input of verify is no JSON object: "),
    "no-object": (call("verify", raw="[1]"), "the input of verify is no JSON object: '[1]'"),
    "unknown-tool": (call("shell", command="ls"), "there is no tool 'shell'; there are read_file"),
    "missing": (call("verify"), "verify: 'file' is missing; it takes file (string)"),
    "surplus": (call("ceilings", now="yes"), "ceilings: unknown 'now'; it takes nothing"),
    "type": (call("read_file", path="a", first="1"), "read_file: 'first' must be of type integer"),
}


@pytest.mark.parametrize("block, says", WRONG.values(), ids=WRONG.keys())
def test_a_call_that_cannot_be_taken_is_answered_as_an_error(block, says, begin, api) -> None:
    talk, table = begin(Step([block]), calls("give_up", reason="done"))
    assert talk.next() is None and table.done == []
    result = api.asked[1]["messages"][-1]["content"][0]
    assert result["is_error"] is True and result["content"].startswith(says)


def test_a_refusal_ends_it_and_what_it_broke_off_is_not_done(begin) -> None:
    step = Step([call("ceilings")], "refusal", details={"type": "refusal", "category": "cyber"})
    talk, table = begin(step)
    assert talk.next() is None and table.done == []
    assert talk.said.ended == "the model refused (cyber)"


def test_a_model_that_calls_no_tool_is_reminded_twice(begin, api) -> None:
    idle = Step([say("I wonder")], "end_turn")
    talk, _ = begin(Step([say("long")], "max_tokens"), idle, idle, calls("ceilings"))
    assert talk.next() is None
    assert talk.said.ended == "the model calls no tool" and len(api.asked) == 3
    assert [m["content"] for m in api.asked[2]["messages"] if m["role"] == "user"][1:] == [
        CUT,
        NUDGE,
    ]


def test_a_model_that_goes_round_in_circles_is_stopped(begin, api) -> None:
    talk, table = begin(*[calls("ceilings")] * (MOST_ANSWERS + 5))
    assert talk.next() is None
    assert talk.said.ended == f"{MOST_ANSWERS} answers without a submission"
    assert len(api.asked) == MOST_ANSWERS == len(table.done)


def test_a_budget_ends_it_before_more_is_asked_and_it_can_go_on(begin, api) -> None:
    dear = {"input_tokens": 30_000, "output_tokens": 2_000}
    steps = [Step([call("ceilings")], usage=dear)] * 2 + [calls("give_up", reason="done")]
    talk, _ = begin(*steps, tokens=66_000)
    with pytest.raises(BudgetSpent, match="may cost more than is left of 66,000 tokens; used: 64"):
        talk.next()
    assert len(api.asked) == 2
    assert api.asked[1]["max_tokens"] < 66_000 - 32_000 - 30_000
    again, _ = begin(tokens=10**6)
    assert again.next() is None and len(api.asked) == 3
    assert again.said.spent.tokens == 64_150


def test_an_answer_that_broke_off_counts_before_it_is_asked_for_again(begin, api) -> None:
    lost = Step([say("it breaks off here")], cut=3, usage={"input_tokens": 30_000})
    talk, _ = begin(lost, calls("give_up", reason="done"), tokens=35_000)
    with pytest.raises(BudgetSpent, match="is left of 35,000 tokens; used: 30,"):
        talk.next()
    assert len(api.asked) == 1
    again, _ = begin(tokens=100_000)
    assert again.next() is None and len(api.asked) == 2
    assert again.said.spent.input == 30_100


def test_an_answer_that_was_under_way_when_the_run_was_killed_counts_as_its_most(begin, api):
    """It may have been paid for, so it is not asked for again unless that fits, too."""
    talk, _ = begin(calls("ceilings"), calls("give_up", reason="done"))
    assert talk.next() is None
    record = talk.record.path
    lines = record.read_bytes().splitlines(keepends=True)
    asked = json.loads(lines[4])
    assert (asked["kind"], asked["most"]) == ("asked", MOST_OUTPUT)
    record.write_bytes(b"".join(lines[:5]))
    again, _ = begin(calls("give_up", reason="done"))
    known = Spent(input=100 + asked["prompt"], output=50 + MOST_OUTPUT)
    assert again.said.spent == known and again.said.asked is None
    assert begin()[0].said.spent == known  # once
    poor, _ = begin(tokens=known.tokens + 500)
    with pytest.raises(BudgetSpent, match="the next answer may cost more than is left"):
        poor.next()
    assert api.asked == []
    assert again.next() is None and again.said.spent == known + Spent(input=100, output=50)


def test_a_request_that_was_sent_and_never_answered_counts_as_read(begin, api) -> None:
    begun, _ = begin(Step([], cut=0), calls("give_up", reason="done"))
    assert begun.next() is None and len(api.asked) == 2
    first = next(e for e in begun.record.events() if e["kind"] == "asked")
    assert begun.said.spent == Spent(input=100 + first["prompt"], output=50)


def test_what_the_service_refused_for_good_is_on_record_and_costs_nothing(begin, api) -> None:
    talk, _ = begin(Step(status=400, kind="invalid_request_error"))
    with pytest.raises(NoAnswer, match="400 invalid_request_error: "):
        talk.next()
    began, _, failed = talk.record.events()
    assert failed["kind"] == "failed" and "invalid_request_error by script" in failed["reason"]
    assert (began["system"], began["settings"]["model"]) == ("system", "claude-opus-5-5")
    again, _ = begin(calls("give_up", reason="done"))
    assert again.said.spent == Spent() and again.next() is None


def test_summaries_and_last_results_are_kept_in_bounds(begin, api) -> None:
    """However many calls there were, and however long the last results are."""
    many = Step([call("ceilings")] * 400, usage={"input_tokens": 9_000})
    big = Step([call("layer_map"), call("layer_map")], usage={"input_tokens": 50_000})
    done = calls("give_up", reason="done")
    talk, _ = begin(many, big, done, most_context=40_000)
    assert talk.next() is None
    (only,) = api.asked[2]["messages"]
    first, calls_so_far, last = only["content"].split("\n\n## ")
    head, *lines = calls_so_far.splitlines()[2:]
    left = 402 - len(lines)
    assert first == "make it faster" and head == f"- {left} earlier calls are left out"
    assert lines[-1] == "- layer_map(): the first line" and left > 0
    assert 9_000 < len(calls_so_far) < 10_100 and last.count("letters are left out") == 2
    assert 10_000 < len(last) < 10_300


def test_a_long_conversation_begins_anew_with_summaries(begin, api) -> None:
    thought = {"type": "thinking", "thinking": "so", "signature": "bound to what came before"}
    big = Step([thought, call("layer_map")], usage={"input_tokens": 50_000})
    talk, _ = begin(calls("ceilings"), big, calls("give_up", reason="done"), most_context=48_000)
    assert talk.next() is None
    assert len(api.asked[1]["messages"]) == 3
    (only,) = api.asked[2]["messages"]
    assert only["content"].startswith("make it faster\n\n## What you did so far\n\n- ceilings(): ")
    assert "- layer_map(): the first line\n" in only["content"]
    assert only["content"].endswith(f"## The last results\n\nlayer_map()\n{LONG}")


def test_a_line_of_a_record_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"kind": "began", "prompt": ""}\n[1]\n')
    with pytest.raises(UserError, match=r"t\.jsonl:2 is no line of a trajectory"):
        list(Trajectory(tmp_path / "t.jsonl").events())
