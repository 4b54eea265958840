"""What Landlock leaves a worker that uses a card."""

import json
import os
import threading

import pytest

from harness import confine

PLACES = "/proc/self/comm", "/proc/self/oom_score_adj", "/proc/sys/kernel/core_pattern"


def probe(folder: str) -> dict[str, str]:
    """What a thread may write, by place: "written" or why not."""
    found = {}

    def write() -> None:
        own = f"/proc/self/task/{threading.get_native_id()}/comm"
        for name, place in (("own name", own), *((p, p) for p in (*PLACES, folder + "-beside"))):
            try:
                with open(place, "w") as file:
                    file.write("0")
                found[name] = "written"
            except OSError as error:
                found[name] = str(error.strerror)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    return found


@pytest.mark.parametrize("cards", [["/dev/null"], []], ids=["card", "no-card"])
def test_a_thread_may_be_named_where_there_is_a_card(cards, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(confine, "devices", lambda: [*confine.DEVICES, *cards])
    ours, theirs = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(ours)
        folder = str(tmp_path / "own")
        os.mkdir(folder)
        told = confine.attempt("landlock", lambda: confine._landlock(folder, [], False))
        found = probe(folder) if told.in_force else {"absent": told.why}
        os.write(theirs, json.dumps(found).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as file:
        found = json.load(file)
    os.waitpid(pid, 0)
    if "absent" in found:
        pytest.skip(f"no Landlock here: {found['absent']}")
    named = found.pop("own name")
    assert named == "written" if cards else named == "Permission denied"
    assert set(found.values()) == {"Permission denied"}
