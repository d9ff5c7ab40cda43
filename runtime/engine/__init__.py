"""Running requests on compiled graphs: scheduler, engine, padding and metrics, in token ids."""
