"""Files that users give or that outlive a process: strict readers, safe writes, checks."""
