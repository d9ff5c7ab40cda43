"""Jobs of several stages, in which later requests are made from earlier answers."""
