"""Evaluation of models with lm-evaluation-harness."""
