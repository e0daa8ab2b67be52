"""Files of training data: what their records may hold, and what is wrong with them."""
