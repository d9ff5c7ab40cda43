"""Weights of a bundle: the same bits on the same shards, and nothing that was touched."""

import json
from pathlib import Path
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import pytest
from counted_arrays import CountedArrays
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tiny import CONFIG, GRID, TinyModel

from noria.compile.numbers import Numbers
from noria.compile.plan import Plan, PlannedModel
from noria.compile.targets import Target
from noria.runtime.batch.disk import Disk
from noria.runtime.batch.peers import ALONE, Peers
from noria.runtime.bundles import weights
from noria.runtime.bundles.bundle import CONTENTS, WEIGHTS, Bundle, Weights, write
from noria.runtime.bundles.own_files import BundleUnusable, opened
from noria.runtime.bundles.warm_start import begin
from noria.runtime.bundles.weights import read_shards, write_shards

PLAN = Plan("cpu", PlannedModel("tiny", ""), Numbers("float32"), GRID)
ELSEWHERE = Path("/nonexistent/model")
SPECS = {
    "cut twice": ((8, 6), np.float32, ("data", "tensor")),
    "cut once": ((6, 4), ml_dtypes.bfloat16, (None, "tensor")),
    "whole": ((5,), np.float32, ()),
    "scalar": ((), np.float32, ()),
}


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("data", "tensor"))


@pytest.fixture(scope="module")
def parameters(mesh) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {
        name: jax.device_put(
            np.asarray(rng.normal(size=shape)).astype(dtype),
            NamedSharding(mesh, PartitionSpec(*spec)),
        )
        for name, (shape, dtype, spec) in SPECS.items()
    }


def read_back(folder: Path, kept, parameters) -> dict[str, jax.Array]:
    abstract = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in parameters.items()}
    with opened(folder) as descriptor:
        shardings = {name: x.sharding for name, x in parameters.items()}
        return read_shards(descriptor, kept, abstract, shardings)


def test_every_shard_comes_back_bit_for_bit_where_it_was(parameters, tmp_path):
    read = read_back(tmp_path, write_shards(Disk(), tmp_path, parameters), parameters)
    for name, x in parameters.items():
        assert read[name].sharding == x.sharding
        assert read[name].dtype == x.dtype
        for ours, theirs in zip(read[name].addressable_shards, x.addressable_shards, strict=True):
            assert ours.device == theirs.device
            assert np.asarray(ours.data).tobytes() == np.asarray(theirs.data).tobytes()


def test_a_box_that_several_devices_hold_is_kept_once(parameters, tmp_path):
    kept = write_shards(Disk(), tmp_path, parameters)
    assert {name: len(boxes) for name, boxes in kept.items()} == {
        "cut twice": 4,
        "cut once": 2,
        "whole": 1,
        "scalar": 1,
    }
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == sum(
        x.nbytes for x in parameters.values()
    )


@pytest.mark.parametrize("num_readers", [1, weights.NUM_READERS])
def test_each_reader_holds_at_most_two_shards_at_once(tmp_path, monkeypatch, num_readers):
    mesh = Mesh(np.array(jax.devices("cpu")), ("tensor",))
    cut = NamedSharding(mesh, PartitionSpec("tensor"))
    parameters = {str(i): jax.device_put(np.full((64, 32), i, "f4"), cut) for i in range(12)}
    kept = write_shards(Disk(), tmp_path, parameters)
    counted = CountedArrays()
    monkeypatch.setattr(weights, "aligned_zeros", counted.zeros)
    monkeypatch.setattr(weights, "NUM_READERS", num_readers)
    read = read_back(tmp_path, kept, parameters)
    assert counted.num_made == 8 * len(parameters)
    assert counted.most <= 2 * num_readers
    for name, x in parameters.items():
        np.testing.assert_array_equal(read[name], x)


def test_weights_cut_for_another_layout_are_refused(parameters, mesh, tmp_path):
    kept = write_shards(Disk(), tmp_path, parameters)
    other = jax.device_put(parameters["cut twice"], NamedSharding(mesh, PartitionSpec("tensor")))
    with pytest.raises(BundleUnusable, match="cut otherwise"):
        read_back(tmp_path, kept, {**parameters, "cut twice": other})


@pytest.fixture
def folder(model, target, tmp_path) -> Path:
    path = tmp_path / "bundle"
    seconds = dict.fromkeys(model.graphs.executables, 0.5)
    weights = Weights("sha256:tiny", model.parameters)
    write(path, PLAN, target, CONFIG, model.graphs, seconds, weights)
    return path


class Loading:
    """Reads the weights of a bundle as a start does."""

    def __init__(
        self,
        model: TinyModel,
        target: Target,
        folder: Path,
        digest: str,
        peers: Peers = ALONE,
    ):
        spec = SimpleNamespace(config=CONFIG)
        files = SimpleNamespace(spec=spec, path=ELSEWHERE, name="tiny")
        weights = SimpleNamespace(result=lambda: digest)
        self.notes: list[str] = []
        self.warm = begin(folder, PLAN, target, files, weights, self.notes.append, peers)
        abstract = model.definition.abstract_parameters("float32")
        shardings = model.placement.parameters(model.definition.logical_axes())
        self.parameters = self.warm.parameters(abstract, shardings)


def refusal(model, target, folder: Path, digest: str = "sha256:tiny") -> str:
    """What is said of weights that are not used; the executables are, all the same."""
    loading = Loading(model, target, folder, digest)
    assert loading.parameters is None
    (said,) = loading.notes
    assert "Reading those of tiny instead" in said
    assert loading.warm.graphs() is not None
    return said


class Beside(Peers):
    """A process beside another one that gathers values of its own."""

    size = 2

    def __init__(self, *theirs: object):
        self._theirs = list(theirs)

    def gather(self, value):
        return [value, self._theirs.pop(0)]


@pytest.mark.parametrize(
    ("theirs", "is_taken"),
    [((None, True, None), True), ((None, False), False), ((None, True, "weights: torn"), False)],
)
def test_weights_are_taken_by_all_processes_or_by_none(model, target, folder, theirs, is_taken):
    """Theirs: why they refuse the bundle, whether it has weights, why they refuse those."""
    pod = folder.with_name("pod")
    pod.mkdir()
    folder.rename(pod / "process-0-of-2")
    loading = Loading(model, target, pod, "sha256:tiny", Beside(*theirs))
    assert (loading.parameters is not None) == is_taken
    is_said = any("process 1: weights: torn. Reading" in note for note in loading.notes)
    assert is_said == (theirs[-1] == "weights: torn")


def test_a_start_takes_the_weights_of_its_bundle(model, target, folder):
    loading = Loading(model, target, folder, "sha256:tiny")
    assert loading.parameters.keys() == model.parameters.keys()
    for name, x in model.parameters.items():
        np.testing.assert_array_equal(loading.parameters[name], x)
    assert not loading.notes


def test_weights_of_another_model_are_refused(model, target, folder):
    assert "weights: 'sha256:tiny' then" in refusal(model, target, folder, "sha256:other")


def test_a_weights_file_cut_short_or_edited_is_refused(model, target, folder):
    path = max((folder / WEIGHTS).iterdir(), key=lambda path: path.stat().st_size)
    content = path.read_bytes()
    path.write_bytes(content[:-4])
    assert f"expected {len(content)} bytes, got {len(content) - 4}" in refusal(
        model, target, folder
    )
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "not the file that was written" in refusal(model, target, folder)
    path.unlink()
    assert "No such file" in refusal(model, target, folder)


def test_a_weights_file_that_others_can_write_is_refused(model, target, folder):
    path = next((folder / WEIGHTS).iterdir())
    path.chmod(0o666)
    assert "can be written by others" in refusal(model, target, folder)


def test_a_parameter_too_few_is_refused(model, target, folder):
    path = folder / CONTENTS
    contents = json.loads(path.read_text())
    gone = next(iter(contents["weights"]["shards"]))
    del contents["weights"]["shards"][gone]
    path.write_text(json.dumps(contents))
    assert gone in refusal(model, target, folder)


def test_a_bundle_without_weights_leaves_them_to_the_model_without_a_word(model, target, folder):
    write(folder, PLAN, target, CONFIG, model.graphs, dict.fromkeys(model.graphs.executables, 0.5))
    assert not any((folder / WEIGHTS).iterdir())
    assert not Bundle.open(folder, PLAN, target, CONFIG, ELSEWHERE).has_weights
    loading = Loading(model, target, folder, "sha256:tiny")
    assert loading.parameters is None
    assert not loading.notes
