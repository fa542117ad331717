"""lora-sidecar: keeps the right LoRA adapters loaded on the right vLLM workers, with no central controller."""

__version__ = "0.1.0"
