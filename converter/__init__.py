"""Plans and executes conversions between checkpoint formats and parallel layouts. No framework is imported to convert."""

__version__ = "0.1.0"
