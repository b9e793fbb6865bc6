"""What would stop a run on this machine, found before it starts."""
