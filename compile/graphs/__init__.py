"""The bodies of graphs, and the arguments that graphs take."""
