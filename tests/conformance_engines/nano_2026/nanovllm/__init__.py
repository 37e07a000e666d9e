raise ImportError("an engine's package imports its model, which needs a GPU")
