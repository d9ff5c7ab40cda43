"""Texts to vectors: the plan of such a job, and the session that runs its graphs."""
