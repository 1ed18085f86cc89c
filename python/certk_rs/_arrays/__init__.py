"""What comes in: arrays of any kind, rows with their options, kept sets."""
