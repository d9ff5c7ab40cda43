"""Compare models with themselves in other numbers, or with each other, on the same tokens."""
