"""Mixture of experts with static shapes: routing, dispatch, expert products and combine."""
