"""Which kernel of a replay is which launch of a recording, from names and order alone.

Kernels in a replayed CUDA graph carry no Python context. The same step was also recorded eagerly,
where every launch has its module and line, and both run the same work in the same order, up to a
few kernels that were renamed, dropped, inserted or swapped. This is a global alignment of two
sequences (Needleman-Wunsch, 1970). A kernel is sure only if every cheapest alignment gives it the
same origin; what remains unclear is marked, never guessed silently.
"""

import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

# Costs: only their order matters. A rename is cheaper than one kernel dropped and another inserted.
SAME, SAME_STEM, RENAMED, GAP = 0, 1, 4, 3
NEIGHBOURHOOD = 8  # kernels on either side among which a swapped kernel must be the only one


@dataclass(frozen=True, kw_only=True)
class Match:
    """The recorded launch that a replayed kernel is, and whether that is in doubt."""

    index: int | None  # None where the recording has nothing like it
    ambiguous: bool


def stem(name: str) -> str:
    """A kernel's name without its template arguments, sizes and counters."""
    return re.sub(r"\d+", "", re.split(r"[<(]", name, maxsplit=1)[0])


def align(
    replayed: Sequence[str], recorded: Sequence[str], origins: Sequence[Hashable]
) -> list[Match]:
    """A match for each replayed kernel; `origins[j]` is where recorded launch j came from.

    Takes 4 bytes and about 20 ns for each pair of a replayed and a recorded kernel where the two
    sequences differ, and nothing where they are equal.
    """
    if len(origins) != len(recorded):
        raise ValueError(f"{len(recorded)} recorded launches have {len(origins)} origins")
    if list(replayed) == list(recorded):
        return [Match(index=i, ambiguous=False) for i in range(len(replayed))]
    partners, optional, path = _partners(replayed, recorded)
    path = _pair_moved(path, replayed, recorded)
    matches: list[Match] = []
    for i, name in enumerate(replayed):
        found = {origins[j] for j in partners[i]}
        alone = _alone(i, path[i], name, replayed, recorded)
        if path[i] is None:
            matches.append(Match(index=None, ambiguous=True))
        elif alone:
            matches.append(Match(index=path[i], ambiguous=False))
        else:
            matches.append(Match(index=path[i], ambiguous=optional[i] or len(found) != 1))
    return _between_neighbours(matches, origins)


def _substitution(replayed: Sequence[str], recorded: Sequence[str]) -> Callable[[int], np.ndarray]:
    """Row i of the substitution costs, as a function of i."""
    ids: dict[str, int] = {}
    stems: dict[str, int] = {}

    def number(names: Sequence[str], table: dict[str, int], key) -> np.ndarray:
        return np.array([table.setdefault(key(n), len(table)) for n in names], dtype=np.int32)

    full = number(replayed, ids, str), number(recorded, ids, str)
    short = number(replayed, stems, stem), number(recorded, stems, stem)

    def row(i: int) -> np.ndarray:
        cost = np.where(short[1] == short[0][i], SAME_STEM, RENAMED)
        return np.where(full[1] == full[0][i], SAME, cost).astype(np.int32)

    return row


def _partners(
    replayed: Sequence[str], recorded: Sequence[str]
) -> tuple[list[list[int]], list[bool], list[int | None]]:
    """For each replayed kernel all launches it has in some cheapest alignment, whether some
    cheapest alignment leaves it without one, and its launch in one of them."""
    n, m = len(replayed), len(recorded)
    cost = _substitution(replayed, recorded)
    ramp = np.arange(m + 1, dtype=np.int32) * GAP
    forward = np.empty((n + 1, m + 1), dtype=np.int32)  # cheapest way to align the first i with j
    forward[0] = ramp
    for i in range(1, n + 1):
        row = forward[i - 1] + GAP
        np.minimum(row[1:], forward[i - 1, :-1] + cost(i - 1), out=row[1:])
        forward[i] = np.minimum.accumulate(row - ramp) + ramp
    best = forward[n, m]
    partners: list[list[int]] = [[] for _ in range(n)]
    optional = [False] * n
    backward = ramp[::-1].copy()  # cheapest way to align what follows (i, j)
    for i in range(n - 1, -1, -1):
        paired = forward[i, :-1] + cost(i) + backward[1:]
        partners[i] = np.flatnonzero(paired == best).tolist()
        optional[i] = bool((forward[i] + GAP + backward == best).any())
        row = backward + GAP
        np.minimum(row[:-1], backward[1:] + cost(i), out=row[:-1])
        backward = (np.minimum.accumulate((row - ramp[::-1])[::-1])[::-1] + ramp[::-1]).astype(
            np.int32
        )
    return partners, optional, _one_path(forward, cost)


def _one_path(forward: np.ndarray, cost: Callable[[int], np.ndarray]) -> list[int | None]:
    """One of the cheapest alignments: the one whose pairs stand latest."""
    i, j = forward.shape[0] - 1, forward.shape[1] - 1
    path: list[int | None] = [None] * i
    while i > 0:
        if j > 0 and forward[i, j] == forward[i - 1, j - 1] + cost(i - 1)[j - 1]:
            i, j = i - 1, j - 1
            path[i] = j
        elif forward[i, j] == forward[i - 1, j] + GAP:
            i -= 1
        else:
            j -= 1
    return path


def _window(names: Sequence[str], centre: int) -> Counter[str]:
    return Counter(names[max(0, centre - NEIGHBOURHOOD) : centre + NEIGHBOURHOOD + 1])


def _alone(
    i: int, j: int | None, name: str, replayed: Sequence[str], recorded: Sequence[str]
) -> bool:
    """Whether both have this very name and it stands only once near either."""
    if j is None or recorded[j] != name:
        return False
    return _window(replayed, i)[name] == 1 and _window(recorded, j)[name] == 1


def _pair_moved(
    path: list[int | None], replayed: Sequence[str], recorded: Sequence[str]
) -> list[int | None]:
    """Pair kernels without a launch with launches of the same name left over nearby."""
    path = list(path)
    free = set(range(len(recorded)))
    free -= {
        j for j, name in zip(path, replayed, strict=True) if j is not None and recorded[j] == name
    }
    taken: set[int] = set()
    for i, name in enumerate(replayed):
        if (j := path[i]) is not None and recorded[j] == name:
            continue
        place = j if j is not None else next((p for p in path[i::-1] if p is not None), 0)
        near = range(max(0, place - NEIGHBOURHOOD), place + NEIGHBOURHOOD + 1)
        moved = [k for k in near if k in free and recorded[k] == name]
        if len(moved) == 1 and _alone(i, moved[0], name, replayed, recorded):
            path[i] = moved[0]
            free.discard(moved[0])
            taken.add(moved[0])
    return [
        None if j in taken and recorded[j] != name else j
        for j, name in zip(path, replayed, strict=True)
    ]


def _between_neighbours(matches: list[Match], origins: Sequence[Hashable]) -> list[Match]:
    """Give a kernel that the recording lacks the origin of what stands before it: surely where what
    stands after it has the same origin, else as a guess."""
    filled = list(matches)
    for i, match in enumerate(matches):
        if match.index is not None:
            continue
        before = next((m for m in reversed(matches[:i]) if m.index is not None), None)
        after = next((m for m in matches[i + 1 :] if m.index is not None), None)
        near = before or after
        if near is None or near.index is None:
            continue
        sure = (
            before is not None
            and after is not None
            and not before.ambiguous
            and not after.ambiguous
            and before.index is not None
            and after.index is not None
            and origins[before.index] == origins[after.index]
        )
        filled[i] = Match(index=near.index, ambiguous=not sure)
    return filled
