"""The plan file: what is written is what is read, and what is not known is refused."""

import tomllib

import pytest

from noria.compile.bucket_grid import BucketGrid
from noria.compile.plan import Plan, PlannedModel

GRID = BucketGrid(64, ((16, 4), (48, 1)), 8, (32, 64), steps_per_call=4, score=True)
PLAN = Plan("cpu", PlannedModel('a "quoted" \\ name', "sha256:00", "float32"), GRID)


def test_a_plan_survives_its_file():
    assert Plan.from_table(tomllib.loads(PLAN.to_toml())) == PLAN


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schema = 1", "schema = 2", "plan schema: expected 1, got 2"),
        ("decode_slots = 8", "decode_slotz = 8", r"unknown \['decode_slotz'\]"),
        ("max_length = 64\n", "", r"missing \['max_length'\]"),
        ("[model]", "[modell]", r"unknown \['modell'\], missing \['model'\]"),
        ('dtype = "float32"', 'dtype = "float16"', "model.dtype: expected float32 or bfloat16"),
        ('"sha256:00"', "7", "model.fingerprint: expected a string, got 7"),
        ('target = "cpu"', 'target = "cpu"\nmeshes = 3', r"unknown \['meshes'\]"),
    ],
)
def test_a_wrong_key_or_value_is_refused_by_name(old, new, message):
    text = PLAN.to_toml()
    assert old in text
    with pytest.raises(ValueError, match=message):
        Plan.from_table(tomllib.loads(text.replace(old, new)))
