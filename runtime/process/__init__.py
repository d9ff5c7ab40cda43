"""This process: the signals that end it, and its standard streams."""
