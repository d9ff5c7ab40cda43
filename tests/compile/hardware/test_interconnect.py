"""Collectives on slices: the torus dimensions of a mesh axis, and the load of the busiest link."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from noria.compile.hardware.hardware import Hardware
from noria.compile.hardware.interconnect import Interconnect, Line

LINK_RATE, ARRAY = 1e7, 1e6


def interconnect(mesh: dict[str, int], dimensions: Sequence[int], wraps: list[int]) -> Interconnect:
    hardware = Hardware("mine", "made up", {"float32": 1e9}, 1e9, 1e8, LINK_RATE, wraps)
    return Interconnect(hardware, mesh, dimensions)


def steps(start: int, end: int, size: int, is_ring: bool) -> Iterator[tuple[int, float]]:
    """Yield the shortest ways between two devices of a line, as signed hops with shares."""
    ways = [end - start]
    if is_ring:
        ways += [ways[0] + size, ways[0] - size]
    shortest = [hops for hops in ways if abs(hops) == min(map(abs, ways))]
    for hops in shortest:
        yield hops, 1 / len(shortest)


def loads(sizes: Sequence[int], rings: Sequence[bool]) -> Counter:
    """Return the load of each directed link in an all-to-all, in arrays of one device.

    Every device sends an even piece to each; one dimension after the other, by the shortest way.
    """
    found: Counter = Counter()
    devices = list(itertools.product(*map(range, sizes)))
    for source, target in itertools.product(devices, devices):
        at = list(source)
        for dimension, (size, is_ring) in enumerate(zip(sizes, rings, strict=True)):
            for hops, share in steps(at[dimension], target[dimension], size, is_ring):
                direction = 1 if hops > 0 else -1
                for hop in range(abs(hops)):
                    place = (at[dimension] + direction * hop) % size
                    before, after = at[:dimension], at[dimension + 1 :]
                    found[(*before, place, *after), dimension, direction] += share / len(devices)
            at[dimension] = target[dimension]
    return found


@pytest.mark.parametrize(
    ("dimensions", "wraps"),
    [
        ((2,), []),
        ((3,), []),
        ((5,), []),
        ((8,), []),
        ((3,), [3]),
        ((7,), [7]),
        ((8,), [4]),
        ((2, 4), [16]),
        ((4, 4), [4]),
        ((2, 8), [8]),
        ((4, 2, 8), [8]),
        ((4, 4, 8), [4, 4, 4]),
        ((2, 4, 4), [4, 4, 4]),
    ],
    ids=str,
)
def test_an_all_to_all_takes_as_long_as_its_busiest_link(dimensions, wraps):
    group = math.prod(dimensions)
    found = interconnect({"expert": group}, dimensions, wraps)
    rings = found.hardware.rings(dimensions)
    sent = ARRAY * (group - 1) / group
    busiest = max(loads(dimensions, rings).values())
    seconds = found.seconds("all-to-all", ("expert",), sent)
    assert seconds == pytest.approx(busiest * ARRAY / LINK_RATE)


@pytest.mark.parametrize("dimensions", [(8,), (4, 4), (4, 4, 4)], ids=str)
def test_where_all_links_are_alike_an_all_to_all_takes_its_mean_distance_over_them(dimensions):
    group, (size, *_) = math.prod(dimensions), dimensions
    found = loads(dimensions, [True] * len(dimensions))
    num_links = 2 * len(dimensions) * group
    mean = sum(found.values()) / num_links
    # a quarter of the way round the ring, over two links
    assert mean == pytest.approx(size / 4 / 2)
    seconds = interconnect({"expert": group}, dimensions, [size]).seconds(
        "all-to-all", ("expert",), ARRAY * (group - 1) / group
    )
    assert seconds == pytest.approx(mean * ARRAY / LINK_RATE)


@pytest.mark.parametrize("size", [4, 8, 16])
def test_an_all_to_all_on_a_ring_takes_a_quarter_of_an_all_gather_of_as_much(size):
    """Expected: the whole array over four times both links ("How to Scale Your Model", part 3)."""
    found = interconnect({"expert": size}, (size,), [size])
    whole = size * ARRAY
    published = whole / (4 * 2 * LINK_RATE)
    seconds = found.seconds("all-to-all", ("expert",), ARRAY * (size - 1) / size)
    assert seconds == pytest.approx(published)
    gathered = found.seconds("all-gather", ("expert",), whole * (size - 1) / size)
    assert gathered == pytest.approx(4 * published * (size - 1) / size)


@pytest.mark.parametrize(
    ("mesh", "dimensions", "wraps", "wanted"),
    [
        ({"data": 4, "tensor": 16}, (4, 4, 4), [4] * 3, {"data": [(4, 2)], "tensor": [(4, 2)] * 2}),
        ({"data": 16, "tensor": 4}, (4, 4, 4), [4] * 3, {"data": [(4, 2)] * 2, "tensor": [(4, 2)]}),
        ({"tensor": 64}, (4, 4, 4), [4, 4, 4], {"tensor": [(4, 2)] * 3}),
        ({"tensor": 16}, (2, 2, 4), [4, 4, 4], {"tensor": [(2, 1), (2, 1), (4, 1)]}),
        ({"tensor": 8}, (2, 4), [16], {"tensor": [(2, 1), (4, 1)]}),
        ({"data": 2, "tensor": 4}, (2, 4), [16], {"data": [(2, 1)], "tensor": [(2, 1), (2, 1)]}),
        ({"tensor": 128}, (8, 16), [16], {"tensor": [(8, 1), (16, 2)]}),
        ({"data": 2, "tensor": 2}, (1, 4), [4], {"data": [(2, 1)], "tensor": [(2, 1)]}),
        ({"data": 8, "tensor": 8}, (4, 4, 4), [4] * 3, {"tensor": [(4, 2), (2, 1)]}),
        (
            {"data": 8, "tensor": 32},
            (16, 16),
            [16],
            {"data": [(8, 1)], "tensor": [(16, 2), (2, 1)]},
        ),
        ({"tensor": 8}, (), [], {"tensor": []}),
    ],
    ids=str,
)
def test_a_part_of_a_dimension_is_an_open_line_and_the_whole_of_one_that_wraps_a_ring(
    mesh, dimensions, wraps, wanted
):
    found = interconnect(mesh, dimensions, wraps)
    for axis, lines in wanted.items():
        assert [(line.size, line.num_links) for line in found.lines((axis,))] == lines


def test_parts_of_a_dimension_are_one_line_where_devices_of_both_axes_send_together():
    found = interconnect({"data": 2, "tensor": 4}, (2, 4), [4])
    assert found.lines(("data", "tensor")) == [Line(2, False), Line(4, True)]


def test_other_collectives_share_all_links_of_a_device():
    def seconds(dimensions: Sequence[int], wraps: list[int], kind: str = "all-reduce") -> float:
        mesh = {"tensor": math.prod(dimensions) or 1}
        return interconnect(mesh, dimensions, wraps).seconds(kind, ("tensor",), ARRAY)

    alone = ARRAY / LINK_RATE
    assert seconds((8,), []) == alone
    assert seconds((8,), [8]) == alone / 2
    assert seconds((2, 4), [16]) == alone / 2
    assert seconds((8, 16), [16]) == alone / 3
    assert seconds((4, 4, 4), [4, 4, 4]) == alone / 6


@pytest.mark.parametrize("kind", ["all-reduce", "all-to-all"])
def test_a_switch_takes_what_a_device_sends_once(kind):
    found = interconnect({"data": 2, "tensor": 4}, (), [])
    for axes in (("tensor",), ("data", "tensor")):
        assert found.seconds(kind, axes, ARRAY) == ARRAY / LINK_RATE
