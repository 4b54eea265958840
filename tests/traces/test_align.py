"""Aligning a replay with a recording: renamed, dropped, inserted, identical and swapped kernels."""

import pytest

from traces.align import Match, align, stem


def sure(*indices: int) -> list[Match]:
    return [Match(index=i, ambiguous=False) for i in indices]


def origins(*names: str) -> list[str]:
    return list(names)


def test_equal_sequences_match_by_position() -> None:
    names = ["gemm", "norm", "gemm", "norm"]
    assert align(names, names, origins("a", "a", "b", "b")) == sure(0, 1, 2, 3)


def test_identical_kernels_in_two_modules_follow_the_order() -> None:
    recorded = ["norm", "gemm<128>", "norm", "gemm<128>"]
    replayed = ["norm", "gemm<64>", "norm", "gemm<64>"]
    assert align(replayed, recorded, origins("a", "a", "b", "b")) == sure(0, 1, 2, 3)


def test_a_renamed_kernel_between_anchors_is_sure() -> None:
    recorded = ["embed", "sm90_gemm", "norm", "softmax"]
    replayed = ["embed", "cutlass_kernel", "norm", "softmax"]
    assert align(replayed, recorded, origins("a", "b", "c", "d")) == sure(0, 1, 2, 3)


def test_a_dropped_kernel_moves_nobody() -> None:
    recorded = ["embed", "fill", "gemm", "norm"]
    assert align(["embed", "gemm", "norm"], recorded, origins("a", "b", "c", "d")) == sure(0, 2, 3)


def test_an_inserted_kernel_inside_one_module_is_sure() -> None:
    recorded = ["embed", "gemm", "norm"]
    replayed = ["embed", "gemm", "memset", "norm"]
    matches = align(replayed, recorded, origins("a", "b", "b"))
    assert matches == sure(0, 1, 1, 2)


def test_an_inserted_kernel_between_modules_is_ambiguous() -> None:
    recorded = ["embed", "gemm", "norm"]
    replayed = ["embed", "gemm", "memset", "norm"]
    matches = align(replayed, recorded, origins("a", "b", "c"))
    assert [m.ambiguous for m in matches] == [False, False, True, False]
    assert matches[2].index == 1


def test_one_of_three_identical_kernels_dropped_is_ambiguous() -> None:
    recorded = ["x", "copy", "copy", "copy", "y"]
    matches = align(["x", "copy", "copy", "y"], recorded, origins("a", "b", "c", "d", "e"))
    assert [m.ambiguous for m in matches] == [False, True, True, False]


def test_one_of_three_identical_kernels_of_one_module_dropped_is_sure() -> None:
    recorded = ["x", "copy", "copy", "copy", "y"]
    matches = align(["x", "copy", "copy", "y"], recorded, origins("a", "b", "b", "b", "e"))
    assert [m.ambiguous for m in matches] == [False, False, False, False]


def test_more_of_the_same_kernel_than_recorded_is_ambiguous() -> None:
    recorded = ["x", "copy", "copy", "y"]
    replayed = ["x", "copy", "copy", "copy", "y"]
    matches = align(replayed, recorded, origins("a", "b", "c", "d"))
    assert [m.ambiguous for m in matches] == [False, True, True, True, False]


@pytest.mark.parametrize("names", [("rope", "gate"), ("add<float>", "add<half>")], ids=str)
def test_two_swapped_kernels_keep_their_own_modules(names: tuple[str, str]) -> None:
    first, second = names
    recorded = ["gemm", first, second, "norm"]
    replayed = ["gemm", second, first, "norm"]
    assert align(replayed, recorded, origins("a", "b", "c", "d")) == sure(0, 2, 1, 3)


def test_two_renamed_kernels_and_one_lost_between_anchors_are_ambiguous() -> None:
    recorded = ["x", "p", "q", "r", "y"]
    matches = align(["x", "s", "t", "y"], recorded, origins("a", "b", "c", "d", "e"))
    assert [m.ambiguous for m in matches] == [False, True, True, False]


def test_layers_with_a_kernel_dropped_in_one_stay_in_step() -> None:
    layer = ["norm", "gemm", "rope", "attend", "gemm", "add"]
    recorded = layer * 50
    where = [f"layer{i // 6}" for i in range(300)]
    replayed = recorded[:62] + recorded[63:]
    matches = align(replayed, recorded, where)
    assert [m.index for m in matches] == [i for i in range(300) if i != 62]
    assert not any(m.ambiguous for m in matches)


def test_unequal_origins_are_refused() -> None:
    with pytest.raises(ValueError, match="2 recorded launches have 1 origins"):
        align(["a"], ["a", "b"], ["m"])


def test_a_stem_drops_templates_and_sizes() -> None:
    assert stem("void gemm_128x64<float, 4>(int)") == "void gemm_x"
