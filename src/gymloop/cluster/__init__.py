"""Where workers live: Ray actors on a cluster, or objects in this process."""
