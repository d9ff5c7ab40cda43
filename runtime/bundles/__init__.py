"""Plans kept with their executables: `noria compile` writes them, later starts load them."""
