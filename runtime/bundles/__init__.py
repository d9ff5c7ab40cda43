"""Plans kept with executables and weights: `noria compile` writes them, later starts load them."""
