"""A trace as DataFrames: types as promised, sums by module, what is unknown stays so."""

from tests.traces import made
from traces import frames
from traces.kernels import kernel_rows
from traces.layers import layer_map
from traces.trace import Trace


def step() -> Trace:
    """A norm of 5 us in a layer's mixer, and a head of 20 us that only the model launches."""
    return made.trace(
        [
            made.Did(name="norm", call=2, time_us=5.0, gap_us=1.0, reads=[(7, 3000)]),
            made.Did(name="head", call=0, time_us=20.0, gap_us=3.0),
        ],
        [("", None), ("layers.0", 0), ("layers.0.mixer", 1), ("layers.0.mix", 1)],
        layers=("layers.0",),
    )


def test_types_are_those_promised() -> None:
    rows = kernel_rows(step(), made.CEILINGS)
    for table, columns in (
        (frames.kernels(rows), frames.KERNELS),
        (frames.layers(layer_map(rows, rows.trace.outline)), frames.LAYERS),
        (frames.modules(rows), frames.MODULES),
    ):
        assert {c: str(t) for c, t in table.dtypes.items()} == columns


def test_a_module_has_all_that_is_inside_it_and_idle_ones_are_left_out() -> None:
    tree = frames.modules(kernel_rows(step())).set_index("module")
    assert list(tree.index) == ["", "layers.0", "layers.0.mixer"]
    assert list(tree["kernels"]) == [2, 1, 1] and list(tree["depth"]) == [0, 2, 3]
    assert list(tree["time_us"]) == [25.0, 5.0, 5.0] and list(tree["share"]) == [1.0, 0.2, 0.2]
    assert list(tree["gap_us"]) == [4.0, 1.0, 1.0]


def test_shares_of_the_bandwidth_need_ceilings() -> None:
    rows = kernel_rows(step())
    assert frames.kernels(rows)["read_share"].isna().to_list() == [True, True]
    known = frames.kernels(rows, made.CEILINGS)["read_share"]
    assert known.isna().to_list() == [False, True]  # nobody knows what the head moved
    assert known.to_list()[0] == 0.6
