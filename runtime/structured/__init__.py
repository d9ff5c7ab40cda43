"""Structured output: schemas and patterns, compiled to tables of token automata."""
