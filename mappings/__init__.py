"""Rule tables: which Hugging Face tensor is which MindSpore parameter, for each model family. No framework is imported here."""
