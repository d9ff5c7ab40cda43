"""The progress of a command, for people on a stream and for programs in a file."""
