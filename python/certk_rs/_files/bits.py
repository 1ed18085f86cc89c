"""Bits of an entry that codes of keys and of values may have."""

KEY_BITS, VALUE_BITS = (8, 12, 16), (8, 4)
