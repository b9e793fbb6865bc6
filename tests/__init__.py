"""Tests mirror the packages; `tests/benchmarks/` holds what is measured."""
