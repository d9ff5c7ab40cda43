"""Differences of facts: tables are compared by their keys, other values as they are."""

import json

from noria.runtime.files.differences import differences, flat

NAMES = ("there", "now")


def test_texts_that_differ_are_shown_with_both_values():
    assert differences({"seed": "0", "same": "x"}, {"seed": "7", "same": "x"}, NAMES) == [
        "  seed: there 0, now 7"
    ]


def test_of_two_tables_only_the_keys_that_differ_are_named():
    first = json.dumps({"target": "cpu", "buckets": {"max_length": 64, "decode_slots": 8}})
    second = json.dumps({"target": "cpu", "buckets": {"max_length": 64}, "mesh": {"data": 2}})
    assert differences({"plan": first}, {"plan": second}, NAMES) == [
        "  plan buckets.decode_slots: there 8, now nothing",
        "  plan mesh.data: there nothing, now 2",
    ]


def test_a_table_in_the_place_of_another_value_is_given():
    plan = json.dumps({"target": "cpu"})
    assert differences({"plan": "derived"}, {"plan": plan}, NAMES) == [
        "  plan: there derived, now given"
    ]
    assert differences({"layout": ""}, {"layout": plan}, NAMES) == [
        "  layout: there none, now given"
    ]
    assert differences({}, {"layout": plan}, NAMES) == ["  layout: there nothing, now given"]


def test_tables_with_keys_in_another_order_differ_by_name():
    first, second = json.dumps({"data": 2, "tensor": 4}), json.dumps({"tensor": 4, "data": 2})
    assert differences({"mesh": first}, {"mesh": second}, NAMES) == [
        "  mesh, order of keys: there data, tensor, now tensor, data"
    ]


def test_a_text_that_only_looks_like_a_table_is_a_text():
    assert differences({"a": "{x"}, {"a": "{y"}, NAMES) == ["  a: there {x, now {y"]


def test_a_nested_table_has_dotted_keys():
    assert flat("plan", {"a": {"b": 1, "c": {"d": 2}}}) == {"plan.a.b": 1, "plan.a.c.d": 2}
    assert flat("plan", {"a": [{"b": 1}], "c": [[2, 3]]}) == {"plan.a.0.b": 1, "plan.c": [[2, 3]]}
