"""Tests of the mappings package."""
