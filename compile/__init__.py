"""(model, grid, target) -> executables. The only floor that lowers and compiles."""
