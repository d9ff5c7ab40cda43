"""Distribution of arrays over devices. Knows axes and devices; no bucket, graph or file."""
