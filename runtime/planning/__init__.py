"""`noria plan` and what it stands on: workloads read, graphs timed, schedules simulated."""
