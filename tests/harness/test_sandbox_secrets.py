"""Candidate code that looks for secrets, files and somebody to talk to finds none of them."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.confine import ROOT, Limits
from harness.observe import CandidateError
from harness.sandbox import Sandbox
from tests.harness.judged import TOY, toy

SECRET = "a-secret-of-" + "whoever-runs-this"
NAME = "CANDIDATE_TEST_TOKEN"
SMALL = Limits(load_s=60.0, call_s=20.0, memory=2 << 30, disk=32 << 20, processes=32)
HIDDEN = ".netrc", ".git-credentials", ".ssh/id_ed25519", ".config/gh/hosts.yml", "notes.txt"
PROBES = Path(__file__).with_name("secrets_probes.py")
CHANGE = """
import json
from optimized.change import Change, Contract, Implementation


def build(node, knobs):
    def forward(x, residual):
        raise RuntimeError("found " + json.dumps(look() | speak()))

    return forward


CHANGE = Change(
    name="probes",
    region="add_norm",
    summary="looks around",
    contract=Contract(numerics="reduction"),
    implementations=(Implementation(backend="torch", devices=("cpu",), build=build),),
)
"""


@dataclass
class Surroundings:
    """What the candidate is `told` that there is to find, and who listens."""

    folder: Path
    told: dict[str, Any]
    listening: dict[str, socket.socket]

    def reached(self) -> list[str]:
        """The servers that somebody has spoken to; of each the first who did."""
        found = []
        for name, server in self.listening.items():
            with contextlib.suppress(BlockingIOError):
                if server.type == socket.SOCK_DGRAM:
                    server.recv(1)
                else:
                    server.accept()[0].close()
                found.append(name)
        return found

    def probes(self, name: str, more: str = "") -> Path:
        """A file that looks for all of it."""
        file = self.folder / name
        file.write_text(PROBES.read_text().replace("{}  # told", repr(self.told)) + more)
        return file


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Surroundings"]:
    """What a candidate is set on: a home with credentials, descriptors that are open and inherited,
    and servers on every kind of local socket; with what reached those."""
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        folder = tmp_path_factory.mktemp("surroundings")
        for place in (folder, *folder.parents):
            if place.owner() == folder.owner() and place != Path("/"):
                place.chmod(place.stat().st_mode | 0o755)
        home = folder / "home"
        for name in HIDDEN:
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(SECRET)
            (home / name).chmod(0o644)
        patch.setenv("HOME", str(home))
        patch.setenv(NAME, SECRET)
        holder = subprocess.Popen(["sleep", "600"], env={**os.environ, NAME: SECRET})
        stack.callback(holder.wait)
        stack.callback(holder.kill)
        inherited = os.open(home / "notes.txt", os.O_RDONLY)
        os.set_inheritable(inherited, True)
        stack.callback(os.close, inherited)
        path, abstract = str(folder / "agent.sock"), f"\0kernelwright-{os.getpid()}"
        listening: dict[str, socket.socket] = {}
        stream, datagrams = socket.SOCK_STREAM, socket.SOCK_DGRAM
        for name, family, kind, address in (
            ("path", socket.AF_UNIX, stream, path),
            ("datagrams", socket.AF_UNIX, datagrams, f"{path}d"),
            ("abstract", socket.AF_UNIX, stream, abstract),
            ("ipv4", socket.AF_INET, stream, ("127.0.0.1", 0)),
        ):
            server = stack.enter_context(socket.socket(family, kind))
            server.bind(address)
            if kind == stream:
                server.listen()
            server.setblocking(False)
            listening[name] = server
        for place in (path, f"{path}d"):
            os.chmod(place, 0o777)
        told = {
            "secret": SECRET[::-1],  # so that it does not stand in the file that looks for it
            "hidden": [str(home / name) for name in HIDDEN],
            "project": str(ROOT),
            "judge": os.getpid(),
            "path": path,
            "abstract": abstract[1:],
            "port": listening["ipv4"].getsockname()[1],
        }
        yield Surroundings(folder, told, listening)


@pytest.fixture(scope="module")
def found(surroundings: Surroundings) -> dict[str, Any]:
    """What the probes say, from one call in a worker of the sandbox."""
    workload, x = toy(), torch.ones(1, 2, 64, dtype=torch.bfloat16)
    with Sandbox(workload.model, workload.device, model=TOY, limits=SMALL) as sandbox:
        candidate = sandbox.open(str(surroundings.probes("probes.py", CHANGE)))
        missing = [row.name for row in sandbox.protections if not row.in_force]
        if missing:
            pytest.skip(f"this machine does not give: {', '.join(missing)}")
        with pytest.raises(CandidateError) as raised:
            candidate.model.blocks[0].first(x, x.clone())
        candidate.close()
    return json.loads(str(raised.value).partition("found ")[2])


def test_a_candidate_finds_no_secret(found) -> None:
    """In its environment, in that of any process that it sees, in a descriptor that was open."""
    assert found["variables"] == [] and found["home"] == "home"
    assert found["holders"] == [] and found["descriptors"] == []
    assert found["sockets"] == 1  # the judge's orders


def test_a_candidate_reads_and_writes_no_path_outside_its_folder(found, surroundings) -> None:
    """Nor through another process's root, memory or descriptors; its own folder it has."""
    assert (found["read"], found["listed"], found["written"]) == ([], [], [])
    assert found["signalled"] == []
    assert "folder" in found["works"]


def test_a_candidate_speaks_to_nobody(found, surroundings) -> None:
    """Not through the loopback, nor to a socket that has a path or an abstract name; what is made
    for its own use works."""
    assert found["spoke"] == [] and surroundings.reached() == []
    assert "pair" in found["works"]


def test_what_passed_the_sandbox_finds_no_secret_and_speaks_to_nobody_either(surroundings) -> None:
    """In the run's own process, neither in the home directory nor in another process."""
    file, mine = surroundings.probes("passed.py"), surroundings.folder / "mine"
    mine.mkdir()
    code = (
        "import json, runpy\n"
        "from pathlib import Path\n"
        "from harness import confined\n"
        f"probes = runpy.run_path({str(file)!r})\n"
        "places = [*map(Path, probes['TOLD']['hidden']), *Path('/proc').glob('[0-9]*/environ')]\n"
        "before = probes['holders'](places)\n"
        "rows = confined.give_up([Path.cwd()], [])\n"
        "seen = probes['speak']() | {'holders': probes['holders'](places)}\n"
        "print(json.dumps([[row.in_force for row in rows], before, seen]))\n"
    )
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(mine / "home")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=mine, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    in_force, before, seen = json.loads(done.stdout)
    if not all(in_force):
        pytest.skip("this machine does not give what confines the run's own process")
    assert (seen["written"], seen["spoke"], surroundings.reached()) == ([], [], [])
    assert seen["works"] == ["folder", "pair"]
    assert set(before) > set(surroundings.told["hidden"])  # and a process's environment
    assert seen["holders"] == []
