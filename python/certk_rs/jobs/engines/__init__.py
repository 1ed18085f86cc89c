"""Where the pieces of a job are done: here, on threads, or on the workers of a cluster."""
