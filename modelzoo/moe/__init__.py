"""Mixture of experts with static shapes: routing, dispatch, the experts' products, combination."""
