"""Plans stored with their executables: `noria compile` writes bundles, later starts load them."""
