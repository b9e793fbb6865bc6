"""What stands on this machine, read without changing it and without importing MindSpore or PyTorch."""
