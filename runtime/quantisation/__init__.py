"""Round a model's weights to codes with calibration, and write them as a folder."""
