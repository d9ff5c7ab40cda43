"""Adapters of peft (LoRA): read from disk, merged into the weights, or stacked for many at once."""
