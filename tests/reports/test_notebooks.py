"""The notebooks, executed: figures in their outputs, and what the command refuses."""

import re
from pathlib import Path

import nbformat
import pytest
from papermill import PapermillExecutionError

from harness.errors import SelfTestError, UserError
from reports import notebook
from reports.__main__ import main
from tests.layout import ROOT
from tests.reports.test_pictures import EVIDENCE
from tests.traces import made
from traces.trace import save

NAMES = "compare_kernels", "compare_runs", "explore_trace", "onboard_model"
README = (ROOT / "optimized" / "README.md").read_text()
TOY = ROOT / "tests" / "agents" / "toy_model.py"

NORM = """import torch
from optimized.change import Change, Contract, Implementation

def build(node, knobs):
    return lambda x: node(x) + torch.tensor(0.01, dtype=x.dtype)

CHANGE = Change(
    name="shifted", region="scaled_norm", summary="wrong", contract=Contract(numerics="reduction"),
    implementations=(Implementation(backend="torch", devices=("cpu",), build=build),),
)
"""


def outputs(path: Path, kind: str) -> list[str]:
    """All outputs of a MIME type, or those of "stream"."""
    found = []
    for cell in nbformat.read(path, 4).cells:
        for out in cell.get("outputs", ()):
            if out.output_type == "stream" and kind == "stream":
                found.append(out.text)
            elif kind in out.get("data", {}):
                found.append("".join(out.data[kind]))
    return found


def tables(path: Path) -> list[list[dict[str, str]]]:
    """Every DataFrame that was shown, as rows of text by column."""
    found = []
    for html in outputs(path, "text/html"):
        rows = [
            re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)
            for row in re.findall(r"<tr.*?</tr>", html, re.DOTALL)
        ]
        if rows:
            head = rows[0]
            found.append([dict(zip(head, row, strict=True)) for row in rows[1:] if any(row[1:])])
    return found


def executed(name: str, out: Path, **parameters: str) -> Path:
    words = [w for key, value in parameters.items() for w in ("-p", key, value)]
    assert main(["notebook", name, *words, "--out", str(out)]) == 0
    return out


def test_notebooks_stand_in_the_repository_without_outputs() -> None:
    assert set(NAMES) <= set(notebook.names())
    for name in notebook.names():
        book = nbformat.read(notebook.FOLDER / f"{name}.ipynb", 4)
        nbformat.validate(book)
        code = [cell for cell in book.cells if cell.cell_type == "code"]
        assert [c.execution_count for c in code] == [None] * len(code)
        assert [c.outputs for c in code] == [[]] * len(code)
        assert [c for c in book.cells if "parameters" in c.metadata.get("tags", ())] == code[:1]
        assert all(p.words for p in notebook.parameters(name).values())


@pytest.fixture
def trace_file(cpu_run: Path) -> Path:
    """Of a run, whose ceilings it takes: two layers of a product and a norm, 30 and 5 us with 2 us
    before each, and a head of 8 us."""
    calls = [("", None)]
    kernels = []
    for layer in ("layers.0", "layers.1"):
        calls += [(layer, 0), (f"{layer}.mixer", len(calls)), (f"{layer}.norm", len(calls))]
        at = len(calls)
        kernels += [
            made.Did(name="mm", call=at - 2, time_us=30.0, reads=[(at, 4000)], matmul=True),
            made.Did(name="norm", call=at - 1, time_us=5.0, reads=[(at + 1, 1000)], written=True),
        ]
    kernels.append(made.Did(name="head", call=0, time_us=8.0, gap_us=11.0))
    step = made.trace(kernels, calls, layers=("layers.0", "layers.1"))
    path = cpu_run / "traces" / "step.json.gz"
    path.parent.mkdir()
    save(step, path)
    return path


def test_a_trace_is_explored(trace_file: Path, tmp_path: Path) -> None:
    out = executed("explore_trace", tmp_path / "out.ipynb", trace=str(trace_file), top="3")
    printed = "".join(outputs(out, "stream"))
    assert "5 kernels, 78.00 µs" in printed
    by_name, by_region, layer, gaps = tables(out)
    assert [(r["name"], r["calls"], r["time_us"]) for r in by_name] == [
        ("mm", "2", "60.0"), ("norm", "2", "10.0"), ("head", "1", "8.0"),
    ]  # fmt: skip
    assert float(by_name[0]["floor_us"]) == pytest.approx(8000 / 4330e3, abs=5e-4)
    assert {r["region"]: r["time_us"] for r in by_region}["mixer"] == "60.0"
    assert [(r["position"], r["name"], r["module"]) for r in layer] == [
        ("1", "mm", "layers.0.mixer"), ("2", "norm", "layers.0.norm"),
    ]  # fmt: skip
    assert (gaps[0]["name"], gaps[0]["gap_us"]) == ("head", "11.0")
    assert re.search(r"(?m)^ +0 +\w+ +2 kernels +35\.0 µs +44\.9%", printed)
    assert len(outputs(out, "image/svg+xml")) == 2


def test_two_runs_are_compared(cpu_run: Path, tmp_path: Path) -> None:
    out = executed("compare_runs", tmp_path / "out.ipynb", first=str(cpu_run), second=str(EVIDENCE))
    said = "".join(outputs(out, "stream"))
    assert "not of the same work: ('beam', 'mini', 'decode-bs1', 0)" in said
    runs, findings, _, changes, _ = tables(out)
    assert [(r["tried"], r["kept"], r["state"]) for r in runs] == [
        ("5", "2", "done"), ("11", "10", "done"),
    ]  # fmt: skip
    assert findings == []
    kept = [r for r in changes if r["status"] == "kept"]
    assert (kept[0]["name"], kept[0]["gain_us"]) == ("residual_boundary", "150.0")
    pictures = outputs(out, "image/svg+xml")
    assert len(pictures) == 3
    assert "first: cpu" in pictures[0] and "qk_norm_scale" in pictures[0]
    assert "prefers-color-scheme:dark" in pictures[1] and ">20.90<" in pictures[2]


@pytest.mark.long
def test_runs_of_one_work_get_the_findings_of_the_check(cpu_run: Path, tmp_path: Path) -> None:
    out = executed("compare_runs", tmp_path / "out.ipynb", first=str(cpu_run), second=str(cpu_run))
    findings = tables(out)[1]
    assert [(f["finding"], f["outcome"]) for f in findings] == [
        ("bits", "not compared"), ("latency, decode", "not compared"),
        ("latency, prefill", "not compared"), ("environment", "same"),
    ]  # fmt: skip


@pytest.fixture
def swiglu(tmp_path: Path) -> Path:
    """The change file of optimized/README.md."""
    (code,) = re.findall(r"<!-- example: change -->\n```python\n(.*?)```", README, flags=re.DOTALL)
    path = tmp_path / "my_swiglu.py"
    path.write_text(code)
    return path


def test_a_change_is_compared_with_the_reference(
    swiglu: Path, cpu_run: Path, tmp_path: Path
) -> None:
    out = executed(
        "compare_kernels", tmp_path / "out.ipynb",
        first=str(swiglu), preset="mini", device="cpu", seconds="0.2", ceilings_of=str(cpu_run),
    )  # fmt: skip
    printed = "".join(outputs(out, "stream"))
    assert "region swiglu: model.layers.*.mlp.activate, 1x1x512, 1x1x512" in printed
    assert "my-swiglu (torch): passed" in printed and "No GPU was used" in printed
    assert "ceilings of Intel Xeon 8481C: 4,330 GB/s" in printed
    (source,) = [html for html in outputs(out, "text/html") if "<pre>" in html]
    assert "class SwiGLU(nn.Module)" in source and "inplace=True" in source
    verdict, points, times = tables(out)
    assert {r["change"] for r in verdict} == {"my-swiglu (torch)"}
    assert int(verdict[0]["elements"]) > 100_000 and verdict[0]["0 ULP"] == verdict[0]["elements"]
    assert points == []
    reference, mine = times
    assert (reference["side"], float(reference["gain_us"])) == ("reference", 0.0)
    assert 1.0 < float(mine["low_us"]) <= float(mine["median_us"]) <= float(mine["high_us"])
    ulps, latency, roof = outputs(out, "image/svg+xml")
    assert "100.00%" in ulps and "share of samples" in latency
    assert "BF16" in roof and "GB/s" in roof


@pytest.mark.long
def test_a_model_file_is_onboarded(tmp_path: Path) -> None:
    norm = tmp_path / "norm.py"
    norm.write_text(NORM)
    out = executed(
        "onboard_model", tmp_path / "out.ipynb",
        model=str(TOY), device="cpu", baselines="eager,graph", change=str(norm),
    )  # fmt: skip
    printed = "".join(outputs(out, "stream"))
    assert "41,152 parameters, 80.4 KiB" in printed and "12 rounding points" in printed
    assert "the judge's replay gives the reference's bits" in printed
    points, regions, baselines, verdict = tables(out)
    assert [p["count"] for p in points if p["rounding point"].startswith("h + ")] == ["2"]
    assert {r["region"]: r["modules"] for r in regions} == {
        "block": "2", "mixer": "2", "scaled_norm": "3", "embedding": "1",
    }  # fmt: skip
    assert [b["absent"] for b in baselines] == ["", "a CPU has no CUDA graphs"]
    assert verdict[0]["change"] == "shifted (torch)"
    assert "shifted (torch) on scaled_norm: REJECTED: " in printed
    assert "shifted (torch): only what passed is timed" in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no_such"], "unknown notebook 'no_such'; choose one of compare_"),
        (["compare_runs"], "compare_runs needs -p first VALUE: a run directory"),
        (["compare_runs", "-p", "third", "x"], "no parameter 'third'; it has: first, second"),
        (["explore_trace", "-p", "top", "many"], "top is 'many'; give a whole number"),
        (["onboard_model", "-p", "minutes", "x"], "onboard_model needs -p model VALUE: a known"),
    ],
)  # fmt: skip
def test_bad_names_and_parameters_are_refused(words: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        main(["notebook", *words, "--out", str(tmp_path / "out.ipynb")])


def test_values_are_read_in_the_types_of_their_defaults() -> None:
    given = {"first": "A", "second": "B", "across_environments": "TRUE"}
    assert notebook.read("compare_runs", given) == {**given, "across_environments": True}
    kernels = notebook.read("compare_kernels", {"first": "1", "seconds": "2", "seed": "3"})
    assert kernels == {"first": "1", "seconds": 2.0, "seed": 3}
    with pytest.raises(UserError, match="across_environments is '1'; give true or false"):
        notebook.read("compare_runs", {**given, "across_environments": "1"})


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    words = {"no/out.ipynb": "there is no folder", "out.html": "name a FILE.ipynb"}
    for out, says in words.items():
        with pytest.raises(UserError, match=says):
            main(["notebook", "explore_trace", "--out", str(tmp_path / out)])


def test_what_a_cell_refuses_is_one_line_and_nothing_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out.ipynb"
    with pytest.raises(UserError, match="^notebook explore_trace: cannot read the trace gone.gz"):
        main(["notebook", "explore_trace", "-p", "trace", "gone.gz", "--out", str(out)])
    assert not out.exists()


@pytest.mark.parametrize(
    "kind", [SelfTestError, pytest.param(ZeroDivisionError, marks=pytest.mark.long)]
)
def test_a_failed_self_test_is_one_and_our_mistakes_keep_their_traceback(
    kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = ["x = 1  # a number", f"from harness.errors import *\nraise {kind.__name__}('so')"]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    book.cells[0].metadata["tags"] = ["parameters"]
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "", "language": "python"}
    nbformat.write(book, tmp_path / "own.ipynb")
    monkeypatch.setattr(notebook, "FOLDER", tmp_path)
    raised = SelfTestError if kind is SelfTestError else PapermillExecutionError
    with pytest.raises(raised, match="so"):
        notebook.execute("own", {"x": "2"}, tmp_path / "out.ipynb")
    assert not (tmp_path / "out.ipynb").exists()


def test_without_the_extra_the_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notebook, "LIBRARIES", ("no_such_library",))
    with pytest.raises(UserError, match=r"no_such_library; install it: pip .*\[notebooks\]"):
        main(["notebook", "explore_trace", "--out", str(tmp_path / "out.ipynb")])
