"""The work of `noria plan`: read workloads, time graphs, simulate schedules, search for plans."""
