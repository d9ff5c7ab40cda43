"""The sizes of meshes, for any number of devices."""

import math
from itertools import product

import pytest

from noria.sharding.mesh_layout import MeshLayout


@pytest.mark.parametrize("num_devices", [1, 8, 36, 97])
def test_all_sizes_of_a_mesh_are_all_products(num_devices):
    mesh = MeshLayout((("data", 1), ("tensor", 1), ("sequence", 1)))
    found = [tuple(size for _, size in fitted.axes) for fitted in mesh.all_fitted(num_devices)]
    sizes = product(range(2, num_devices + 1), repeat=3)
    assert found == [wanted for wanted in sizes if math.prod(wanted) == num_devices]


def test_the_sizes_for_very_many_devices_are_found_at_once():
    mesh = MeshLayout((("data", 1), ("tensor", 1)))
    assert len(mesh.all_fitted(10**12)) == 13**2 - 2
