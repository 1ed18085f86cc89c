"""Files: what is read is checked to the last byte, what is written appears whole or not at all."""
