"""The presses of `certk_rs.kvpress`, a file each, and how queries are noted for them."""
