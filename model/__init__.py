"""The bundled models. `model.config` is plain Python; everything else here needs MindSpore."""
