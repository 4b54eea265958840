"""Which launch knobs are tried first, where a choice is among engines by name."""

from agents.knob_search import Space


def space(**choices) -> Space:
    def is_valid(values):
        """ "library" takes the first of each number, "own" even rows."""
        if values.get("engine") == "library":
            return (values["rows"], values["warps"]) == (1, 1)
        return values["rows"] % 2 == 0

    numbers = {"rows": tuple(range(1, 101)), "warps": (1, 2, 4, 8)}
    heuristic = {"rows": 2, "warps": 1}
    if choices:
        heuristic["engine"] = "own"
    return Space(candidates={**numbers, **choices}, heuristic=heuristic, is_valid=is_valid)


def test_an_engine_with_one_valid_choice_among_hundreds_is_tried() -> None:
    found = space(engine=("own", "library")).drawn(11)
    assert found[0] == {"rows": 1, "warps": 1, "engine": "library"}
    assert len(found) == 11 and all(v["engine"] == "own" for v in found[1:])
    assert len({tuple(v.items()) for v in found}) == 11


def test_an_engine_with_no_valid_choice_takes_nobodys_place() -> None:
    found = space(engine=("own", "absent", "library")).drawn(4)
    assert [v["engine"] for v in found].count("library") == 1
    assert len(found) == 4


def test_numbers_alone_are_drawn_as_ever() -> None:
    found = space().drawn(3)
    assert found == space().drawn(3)
    assert len(found) == 3 and all(set(v) == {"rows", "warps"} for v in found)


def test_an_engine_to_which_most_knobs_say_nothing_is_tried_several_times() -> None:
    silent = {f"silent{i}": (0, 1, 2, 3) for i in range(5)}
    candidates = {"rows": tuple(range(1, 101)), **silent, "engine": ("own", "other")}

    def is_valid(values):
        return values["engine"] == "own" or not any(values[name] for name in silent)

    heuristic = {**dict.fromkeys(silent, 1), "rows": 2, "engine": "own"}
    found = Space(candidates=candidates, heuristic=heuristic, is_valid=is_valid).drawn(11)
    assert len(found) == 11 and 5 <= sum(v["engine"] == "other" for v in found) <= 6
    assert len({v["rows"] for v in found if v["engine"] == "other"}) >= 3


def test_of_few_those_next_to_the_heuristic_come_first() -> None:
    """Time may end before the others: a prefill's attention was never timed with its library."""
    candidates = {"rows": (64, 128), "stages": (2, 3), "warps": (4, 8), "engine": ("own", "other")}
    heuristic = {"rows": 128, "stages": 3, "warps": 8, "engine": "own"}

    def is_valid(values):
        return values["engine"] == "own" or {**values, "engine": "own"} == heuristic

    found = Space(candidates=candidates, heuristic=heuristic, is_valid=is_valid).few()
    assert found is not None and len(found) == 9
    apart = [sum(v[n] != x for n, x in heuristic.items()) for v in found]
    assert apart == [0, 1, 1, 1, 1, 2, 2, 2, 3]
    assert {**heuristic, "engine": "other"} in found[1:5]
