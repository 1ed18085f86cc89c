"""KV caches in the files of other programs, a file a format, and their way into a cache file."""
