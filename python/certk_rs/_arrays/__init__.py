"""Arguments: arrays of any kind, rows with their options, kept sets."""
