"""Pods: several processes that run one job in step over one mesh of all their devices."""
