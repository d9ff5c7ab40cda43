"""The batch job: lines in, journal, results out. Imports jax only to build something."""
