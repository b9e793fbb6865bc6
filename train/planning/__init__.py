"""What a run would need and cost, before a device is touched: memory, traffic and time of each layout. No framework is imported."""
