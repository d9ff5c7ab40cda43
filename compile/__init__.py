"""(model, grid, target) -> executables. The only package that lowers and compiles."""
