"""The tools that a model gets: their schemas, and the check of what it sends. Torch-free."""

from typing import Any

from agents.claude.trajectory import Call

TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
FILE = {"type": "string", "description": "name of a change file that you wrote, such as a.py"}


def tool(name: str, about: str, optional: tuple[str, ...] = (), **given: Any) -> dict[str, Any]:
    required = [n for n in given if n not in optional]
    schema = {
        "type": "object",
        "properties": given,
        "required": required,
        "additionalProperties": False,
    }
    return {"name": name, "description": about, "input_schema": schema}


TOOLS = [
    tool(
        "read_file",
        "Lines of a text file of the project, or of a change file that you wrote "
        "(candidates/a.py).",
        ("first", "last"),
        path=TEXT,
        first=NUMBER,
        last=NUMBER,
    ),
    tool(
        "search",
        "Lines of the project's files that contain a text; under a folder or file where one is "
        "given.",
        ("under",),
        text=TEXT,
        under=TEXT,
    ),
    tool(
        "kernel_table",
        "The kernels of the traced step by source line: time, bytes, operations, floor; of one "
        "region where one is given.",
        ("region",),
        region=TEXT,
    ),
    tool("layer_map", "The kernels of one layer of each kind, in launch order."),
    tool(
        "region",
        "One region: its modules, its source, the shapes it is called with, and its rounding "
        "points by the names that a contract uses.",
        region=TEXT,
    ),
    tool("ceilings", "What this machine can do at most, measured."),
    tool("attempts", "Everything that this run tried so far, with verdicts and times."),
    tool(
        "write_change",
        "Write a change file into the run's folder for candidates, over an older one of that name.",
        file=FILE,
        text={"type": "string", "description": "the whole file"},
    ),
    tool(
        "verify",
        "The verdict on a change file's region, from the judge's sandbox. Nothing is recorded as "
        "an attempt.",
        file=FILE,
    ),
    tool(
        "bench",
        "The time of the region with a change file that passed verify, beside the reference's, in "
        "interleaved pairs in the sandbox.",
        file=FILE,
    ),
    tool(
        "profile",
        "Nsight Compute's metrics of the region's first call with a change file that passed "
        "verify, kernel by kernel. Without a card or ncu: the registers, spills and shared memory "
        "of the Triton kernels in the file's offline_cases() (files of optimized/ have such a "
        "function), compiled for several cards.",
        file=FILE,
    ),
    tool(
        "submit",
        "Have a change file tried by the run: judged, timed in the whole model, kept or not. The "
        "answer is the decision with the judge's words.",
        file=FILE,
        hypothesis={"type": "string", "description": "what it gains and why, in one sentence"},
    ),
    tool("give_up", "End the work: nothing is left that is worth a try.", reason=TEXT),
]
END_ROUND = tool(  # only where a round takes more than one candidate
    "end_round",
    "Have the change files that were submitted in this round judged now, although more would fit.",
)
BY_NAME = {t["name"]: t["input_schema"] for t in (*TOOLS, END_ROUND)}
TYPES = {"string": str, "integer": int}


def complaint(call: Call) -> str | None:
    """What is wrong with a call's name or input, and what is allowed; None if nothing is."""
    if call.malformed is not None:
        return f"the input of {call.name} is no JSON object: {call.malformed[:200]!r}"
    schema = BY_NAME.get(call.name)
    if schema is None:
        return f"there is no tool {call.name!r}; there are {', '.join(BY_NAME)}"
    allowed = schema["properties"]
    wrong = [f"unknown {n!r}" for n in call.input if n not in allowed]
    wrong += [f"{n!r} is missing" for n in schema["required"] if n not in call.input]
    for name, value in call.input.items():
        wanted = allowed.get(name, {}).get("type")
        if wanted and (not isinstance(value, TYPES[wanted]) or isinstance(value, bool)):
            wrong.append(f"{name!r} must be of type {wanted}")
    if not wrong:
        return None
    words = ", ".join(f"{n} ({p['type']})" for n, p in allowed.items()) or "nothing"
    return f"{call.name}: {'; '.join(wrong)}; it takes {words}"
