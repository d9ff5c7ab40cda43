"""The subcommands of `noria`, one file each: its options, and the function that runs it."""
