"""Files: inputs are checked to the last byte, outputs appear whole or not at all."""
