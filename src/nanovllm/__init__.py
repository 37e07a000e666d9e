"""nanovllm: an executable specification of LLM inference engines."""
