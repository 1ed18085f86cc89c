"""What `certk_rs.torch` stands on: its operators, and the gradient of one of them."""
