"""From a workload to a plan: work and cost of graphs, and the search for buckets."""
