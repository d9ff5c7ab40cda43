"""The dtype that follows from the processor's instructions."""

import pytest

from noria.compile.targets import find_target
from noria.runtime import session
from noria.runtime.devices import machine


@pytest.mark.parametrize(
    ("vendor", "instructions", "dtype"),
    [
        ("GenuineIntel", ["avx2", "avx512f", "avx512_bf16", "amx_bf16"], "bfloat16"),
        ("GenuineIntel", ["avx2", "avx512f", "avx512_bf16"], "float32"),
        ("AuthenticAMD", ["avx2", "avx512f", "avx512_bf16"], "bfloat16"),
        ("AuthenticAMD", ["avx2", "avx512f"], "float32"),
        (None, [], "float32"),
    ],
)
def test_auto_is_the_faster_dtype_of_the_processor(monkeypatch, vendor, instructions, dtype):
    monkeypatch.setattr(machine, "instructions", lambda: instructions)
    monkeypatch.setattr(machine, "vendor", lambda: vendor)
    assert session.resolve_dtype("auto", find_target("cpu")) == dtype


def test_a_dtype_that_is_asked_for_is_taken(monkeypatch):
    monkeypatch.setattr(machine, "instructions", lambda: ["amx_bf16"])
    assert session.resolve_dtype("float32", find_target("cpu")) == "float32"
