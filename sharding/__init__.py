"""How arrays lie on devices. Knows axis names and devices; knows no bucket, graph or file."""
