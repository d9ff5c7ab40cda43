"""Adapters of peft (LoRA): read from disk, merged into the weights, or used by row."""
