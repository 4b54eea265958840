"""Candidates in processes of their own: what is handed over, what is refused, what ends them."""

import json
import os
import signal
import socket
import struct
import time
from pathlib import Path

import pytest
import torch

from harness import wire
from harness.cases import record
from harness.confine import Limits, Mechanism
from harness.domains import judge_with_domain
from harness.errors import UserError
from harness.handover import PATTERN, Block, Layout, decode, encode, pack, place
from harness.judge import judge_region
from harness.observe import CandidateError, observe
from harness.process import describe_end, scrubbed
from harness.protections import PROTECTIONS, describe, protections, require
from harness.sandbox import Sandbox
from harness.sandboxed import judge_sandboxed
from harness.steps import steps
from harness.trees import leaves, same_bits
from optimized.catalog import load_change
from optimized.change import apply_change, share
from tests.harness.judged import LIMIT_BYTES, TOY, toy

CHEATS = Path(__file__).with_name("cheats")
SMALL = Limits(load_s=60.0, call_s=20.0, memory=2 << 30, disk=32 << 20, processes=32)


@pytest.fixture(scope="module")
def sandbox():
    workload = toy()
    with Sandbox(workload.model, workload.device, model=TOY, limits=SMALL) as box:
        yield box


def write(path: Path, forward: str, before: str = "") -> str:
    """A change file for `add_norm` whose forward is `forward`."""
    text = (CHEATS / "honest_one_pass.py").read_text()
    text = text.replace("return honest(node, x, residual)", forward)
    text = text.replace("import torch\n", f"import torch\n{before}\n", 1)
    path.write_text(text)
    return str(path)


# Messages


@pytest.fixture
def sockets():
    pair = socket.socketpair()
    yield pair
    for end in pair:
        end.close()


def test_a_message_arrives_whole(sockets):
    wire.send(sockets[0], {"op": "call", "n": [1, 2]}, b"\x00blob")
    assert wire.receive(sockets[1], 1.0) == ({"op": "call", "n": [1, 2]}, b"\x00blob", [])


class Hasty:
    """A socket whose other side takes a message and is gone."""

    def __init__(self) -> None:
        self.mine, self.other = socket.socketpair()
        self.sendmsg = self.mine.sendmsg

    def sendall(self, data: bytes) -> None:
        self.mine.sendall(data)
        self.other.recv(1 << 16)
        self.other.close()


def test_nothing_follows_the_last_byte_of_a_message():
    """The other side may have answered by then, and ended."""
    hasty = Hasty()
    assert wire.send(hasty, {"op": "stop"}) is None  # type: ignore[arg-type]
    assert hasty.other.fileno() == -1
    hasty.mine.close()


@pytest.mark.parametrize(
    "sent, error",
    [
        (struct.pack("<II", 1 << 31, 1 << 31), wire.Garbled),
        (struct.pack("<II", 3, 0) + b"xyz", wire.Garbled),
        (struct.pack("<II", 2, 0) + b"[]", wire.Garbled),
        (struct.pack("<II", 100, 0) + b'{"half":', wire.Late),
        (b"", wire.Late),
    ],
    ids=["four-gigabytes", "no-json", "no-object", "half", "nothing"],
)
def test_a_bad_message_ends_the_wait(sockets, sent, error):
    sockets[0].sendall(sent)
    started = time.monotonic()
    with pytest.raises(error):
        wire.receive(sockets[1], 0.2)
    assert time.monotonic() - started < 10


def test_a_closed_end_is_told(sockets):
    sockets[0].close()
    with pytest.raises(wire.Closed):
        wire.receive(sockets[1], 1.0)


# Shared memory


def test_tensors_come_back_as_they_are_written_to():
    values = torch.arange(24.0).view(4, 6)[:, ::2], torch.tensor(True), torch.zeros(0, 3)
    layout = Layout()
    for tensor in values:
        layout.add(tensor)
    block = Block(layout.end, torch.device("cpu"))
    layout.write(block.bytes)
    there = place(block.bytes, layout.spots[0])
    assert there.stride() == values[0].stride()
    assert torch.equal(there, values[0])
    there.add_(1)
    assert layout.read_back(block.bytes) == 0
    assert torch.equal(values[0], torch.arange(24.0).view(4, 6)[:, ::2] + 1)
    block.close()


@pytest.mark.parametrize("offset", [0, 1, 8])
def test_tensors_lie_there_as_they_lie_here(offset):
    """What is judged is the layout and the alignment that the judge's call has."""
    room = torch.arange(48, dtype=torch.bfloat16)
    flat = room[offset : offset + 24]
    values = flat, flat.view(4, 6).t(), flat[:6].expand(3, 6), flat.view(2, 12)[:, None, ::2]
    layout = Layout()
    for tensor in values:
        layout.add(tensor)
    block = Block(layout.end, torch.device("cpu"))
    layout.write(block.bytes)
    for tensor, spot in zip(values, layout.spots, strict=True):
        there = place(block.bytes, spot)
        assert torch.equal(there, tensor) and there.stride() == tensor.stride()
        assert there.data_ptr() % 16 == tensor.data_ptr() % 16 == 2 * offset % 16
    place(block.bytes, layout.spots[2])[0, 3] = -7.0
    assert layout.read_back(block.bytes) == 0
    assert values[2][:, 3].tolist() == [-7.0] * 3
    block.close()


def test_a_write_past_an_end_is_counted():
    layout = Layout()
    layout.add(torch.zeros(5))
    block = Block(layout.end, torch.device("cpu"))
    layout.write(block.bytes)
    last = layout.spots[0]["offset"] + 20
    block.bytes[last : last + 3] = 1
    assert layout.read_back(block.bytes) == 3
    assert int(block.bytes[last + 3]) == PATTERN
    block.close()


@pytest.mark.parametrize(
    "spot",
    [
        {"offset": 1 << 40, "dtype": "float32", "shape": [2]},
        {"offset": 0, "dtype": "float32", "shape": [1 << 40]},
        {"offset": 0, "dtype": "float32", "shape": [-1]},
        {"offset": 2, "dtype": "float32", "shape": [1]},
        {"offset": 0, "dtype": "float32", "shape": [True]},
    ],
    ids=["offset", "size", "negative", "unaligned", "boolean"],
)
def test_a_place_outside_is_refused(spot):
    with pytest.raises(ValueError, match="a tensor"):
        place(torch.zeros(64, dtype=torch.uint8), spot)


def test_results_are_described_as_data():
    tensors: list[torch.Tensor] = []
    value = (torch.ones(2), {"k": [torch.zeros(3), None], 4: "text"})
    tree = json.loads(json.dumps(encode(value, tensors)))
    back = decode(tree, tensors)
    assert back[1]["k"][1] is None
    assert [path for path, _ in leaves(back)] == [path for path, _ in leaves(value)]
    with pytest.raises(ValueError, match="kind 'call'"):
        decode({"call": ["os.system"]}, tensors)


def test_a_sealed_block_cannot_be_written():
    block = Block(4096, torch.device("cpu"))
    block.bytes.fill_(7)
    block.seal()
    assert int(block.bytes.sum()) == 7 * 4096
    assert block.fd is not None
    with pytest.raises(PermissionError):
        os.write(block.fd, b"x")
    with pytest.raises(PermissionError):
        os.ftruncate(block.fd, 0)
    block.close()


def test_known_storages_are_not_sent_again():
    weight = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    layout = Layout()
    blob = pack((weight, torch.zeros(2)), layout, {weight.untyped_storage()._cdata: 0})
    assert [tuple(spot["shape"]) for spot in layout.spots] == [(2,)]
    assert len(blob) < 400


# Protections


def test_a_missing_protection_is_named_and_required():
    found = [Mechanism(name="seccomp", in_force=False, why="no libseccomp")]
    found += [
        Mechanism(name=name, in_force=True)
        for name in {m for names in PROTECTIONS.values() for m in names} - {"seccomp"}
    ]
    rows = protections(found)
    missing = [row.name for row in rows if not row.in_force]
    assert missing == ["fewer system calls"]
    assert "no libseccomp" in describe(rows)
    with pytest.raises(UserError, match="fewer system calls .seccomp: no libseccomp."):
        require(rows)
    require([row for row in rows if row.in_force])


def test_a_worker_says_what_protects(sandbox):
    sandbox.open(None).close()
    rows = sandbox.protections
    assert [row.name for row in rows] == list(PROTECTIONS)
    assert all(row.by for row in rows if row.in_force)
    assert all(row.absent for row in rows if not row.in_force)
    sandbox.required = True
    try:
        if all(row.in_force for row in rows):
            sandbox.open(None).close()
        else:
            with pytest.raises(UserError, match="--require-sandbox"):
                sandbox.open(None)
    finally:
        sandbox.required = False


def test_the_environment_is_scrubbed(monkeypatch, tmp_path):
    monkeypatch.setenv("API_KEY_OF_SOMEBODY", "secret")
    found = scrubbed(str(tmp_path))
    assert "secret" not in found.values()
    assert found["PATH"] == os.environ["PATH"]
    assert found["TRITON_CACHE_DIR"] == str(tmp_path / "triton")


@pytest.mark.parametrize(
    "ended, words",
    [
        ({"ended": 0, "reason": None}, "exit status 0"),
        ({"ended": 3 << 8, "reason": None}, "exit status 3"),
        ({"ended": int(signal.SIGSEGV), "reason": None}, "SIGSEGV"),
        ({"ended": None, "reason": "has 99 processes, 32 are allowed"}, "99 processes"),
        (None, "supervisor"),
    ],
)
def test_an_end_is_described(ended, words):
    assert words in describe_end(ended)


# Candidates


def test_a_worker_computes_what_the_reference_computes(sandbox):
    model = toy().model
    names = [name for name, _ in model.named_modules() if name.count(".") == 2][:6]
    cases, _ = record(model, names, steps(toy(), 0, sizes=False), LIMIT_BYTES)
    candidate = sandbox.open(None)
    try:
        assert {case.node for case in cases} == set(names)
        for case in cases:
            ours = observe(model.get_submodule(case.node), model, case, set())
            theirs = observe(candidate.model.get_submodule(case.node), model, case, set())
            assert theirs.integers.keys() == ours.integers.keys()
            for mine, yours in ((ours.results, theirs.results), (ours.arguments, theirs.arguments)):
                assert mine.keys() == yours.keys()
                assert all(same_bits(tensor, yours[name]) for name, tensor in mine.items())
    finally:
        assert candidate.close() == []


def test_a_verdict_is_the_same_as_in_this_process(sandbox, tmp_path):
    body = "a, b = honest(node, x.float(), residual.float()); return a.to(x.dtype), b.to(x.dtype)"
    path = write(tmp_path / "elided.py", body)
    workload, change = toy(), load_change(path)
    inside = share(workload.model)
    apply_change(inside, change, "torch")
    ours = judge_region(workload.model, inside, change, "torch", workload, 3)
    candidate = sandbox.open(path)
    assert candidate.change is not None
    theirs = judge_region(
        workload.model, candidate.model, candidate.change, candidate.backend, workload, 3
    )
    candidate.close()
    assert ours.passed is False
    assert theirs.reason == ours.reason
    assert theirs.outputs == ours.outputs
    assert theirs.points == ours.points


GUARD = """
def guard(node, x, residual):
    return "a single token" if x.shape[1] == 1 else None

"""


def test_a_sandboxed_verdict_has_the_same_domain(sandbox, tmp_path):
    path = Path(write(tmp_path / "guarded.py", "return honest(node, x, residual)", GUARD))
    path.write_text(path.read_text().replace("build=build)", "build=build, guard=guard)"))
    workload, change = toy(), load_change(str(path))
    inside = share(workload.model)
    apply_change(inside, change, "torch")
    targets = "decode-bs1", "prefill-8x2048"
    ours = judge_with_domain(workload.model, inside, change, "torch", workload, 3, targets=targets)
    candidate = sandbox.open(str(path))
    assert candidate.change is not None
    theirs = judge_with_domain(
        workload.model, candidate.model, candidate.change, "torch", workload, 3, targets=targets
    )
    assert ours.passed and ours.domain is not None and len(ours.domain.calls) > 0
    assert theirs.domain is not None and theirs.domain == ours.domain
    declined = "decode-bs1: the reference runs, its kernel declines: a single token"
    assert declined in ours.notes and declined in theirs.notes
    lengths = {low for call in theirs.domain.calls for low, _ in [call.arguments["x"].sizes[1]]}
    assert 1 not in lengths

    candidate.limit(theirs.domain)
    node = candidate.model.get_submodule(candidate.replaced[0])
    x = torch.ones(3, 4097, 64, dtype=torch.bfloat16)
    before = set(candidate.notes)
    candidate.calls.clear()  # of a node's first two calls a profiler always sees the second
    for _ in range(2):
        node(x, x)
    (said,) = set(candidate.notes) - before
    assert "the reference runs instead, outside what was tested: x has 4097 in dimension 1" in said
    assert candidate.close() == []


def test_a_change_judged_in_the_sandbox_is_limited_to_what_was_tested(tmp_path):
    path = write(tmp_path / "right.py", "return honest(node, x, residual)")
    judged = judge_sandboxed(toy(), path, None, 3, limits=SMALL)
    assert judged.passed, judged.verdicts[-1].reason
    region, model = judged.verdicts
    assert region.domain is not None and set(region.domain.calls[0].arguments) == {"x", "residual"}
    assert (model.scope, model.domain) == ("model", None)


def test_the_contract_comes_as_data(sandbox, tmp_path):
    path = Path(write(tmp_path / "data.py", "return honest(node, x, residual)"))
    text = path.read_text().replace(
        'Contract(numerics="reduction")',
        'Contract(numerics={"residual": "exact"}, elides={"p": "why"}, batch_invariant=True)',
    )
    path.write_text(text)
    candidate = sandbox.open(str(path))
    assert candidate.change is not None
    contract = candidate.change.contract
    assert contract.numerics == {"residual": "exact"}
    assert contract.elides == {"p": "why"}
    assert contract.batch_invariant
    assert candidate.change.implementations == ()
    candidate.close()


@pytest.mark.parametrize(
    "forward, reason",
    [
        ("import os; os._exit(0)", "ended with exit status 0 before it answered"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("import time; time.sleep(60)", "gave no answer within 2 s"),
        ("return x, [torch.ones(1, device='meta')]", "returns a tensor that is torch.strided on"),
        ("raise KeyError('own words')", "KeyError: 'own words'"),
    ],
    ids=["exit-0", "killed", "sleeps", "meta", "raises"],
)
def test_what_ends_a_call_is_told_and_the_next_candidate_runs(sandbox, tmp_path, forward, reason):
    path = write(tmp_path / "broken.py", forward)
    candidate = sandbox.open(path)
    candidate.limits = Limits(call_s=2.0)
    x = torch.ones(1, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(CandidateError) as raised:
        candidate.model.blocks[0].first(x, x.clone())
    assert reason in str(raised.value)
    candidate.close()
    honest = sandbox.open(str(CHEATS / "honest_one_pass.py"))
    ours = toy().model.blocks[0].first(x, x)
    theirs = honest.model.blocks[0].first(x, x)
    assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))
    honest.close()


def processes_of(folder: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if folder.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
                elif os.readlink(entry / "cwd").startswith(folder):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def test_nothing_survives_its_candidate(sandbox):
    candidate = sandbox.open(str(CHEATS / "forks_survivor.py"))
    folder = candidate.process.folder
    findings = candidate.close()
    assert findings == ["leaves 4 process(es) behind"]
    assert not Path(folder).exists()
    deadline = time.monotonic() + 10
    while processes_of(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of(folder) == []


def test_a_stopped_candidate_does_nothing(sandbox, tmp_path):
    forward = """
        import threading
        out = torch.zeros_like(x)
        def count():
            while True:
                out.add_(1)
                x.add_(1)
        threading.Thread(target=count, daemon=True).start()
        return residual, out"""
    path = write(tmp_path / "counts.py", forward)
    candidate = sandbox.open(path)
    x = torch.zeros(1, 2, 64, dtype=torch.bfloat16)
    candidate.model.blocks[0].first(x, x.clone())
    memory = candidate.blocks["in"].bytes
    with candidate.stopped():
        time.sleep(0.05)
        before = memory.clone()
        time.sleep(0.2)
        assert torch.equal(memory, before)
    candidate.close()


def test_wrong_files_are_the_users_mistake(sandbox, tmp_path):
    for text, words in (
        ("x = 1", "it must define CHANGE"),
        ("import nowhere_to_be_found", "ModuleNotFoundError"),
        (f"{'x' * 5} = ", "SyntaxError"),
    ):
        path = tmp_path / "wrong.py"
        path.write_text(text)
        with pytest.raises(UserError, match=words):
            sandbox.open(str(path))
    with pytest.raises(UserError, match="no change file at"):
        sandbox.open(str(tmp_path / "none.py"))


@pytest.mark.gpu
def test_a_card_is_handed_over():
    """On a GPU: the same bits through CUDA IPC or, where that does not work, through copies."""
    device = torch.device("cuda", 0)
    model = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16, device=device)
    with Sandbox(model.requires_grad_(False), device) as box:
        candidate = box.open(None)
        x = torch.randn(3, 64, dtype=torch.bfloat16, device=device)
        assert same_bits(candidate.model(x), model(x))
        assert candidate.close() == []
        assert box.ipc or box.no_ipc
