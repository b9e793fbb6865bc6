"""HCCL's rank table: which process runs on which device of which server."""
