"""Shapes of decode steps for predictions."""

from noria.sharding.call import Call


def step_of(slots: int, span: int) -> Call:
    """Return one decode step of slots that all have the same length."""
    return Call("decode", slots, 1, span, entries=slots * span)
