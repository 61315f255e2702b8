"""Where the environment of a job is read."""
