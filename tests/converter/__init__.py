"""Tests of converter/."""
