"""The operators of `certk_rs.torch`, and the gradient of one of them."""
