"""From a workload to a plan: hardware, work and cost of graphs, and the search for buckets."""
