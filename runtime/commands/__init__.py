"""The subcommands of `noria`: one file for each, with its options and the function that runs it."""
