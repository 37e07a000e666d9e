"""Which class builds which architecture."""

from nanovllm.models.model_config import Architecture
from nanovllm.models.qwen3 import Qwen3ForCausalLM

MODEL_CLASSES = {Architecture.QWEN3: Qwen3ForCausalLM}
