"""What is measured: `make bench`. Ratios of medians, taken in turn in one run; no test depends on a time."""
