"""Files of users and files that outlive a process: strict readers, safe writes, checks."""
