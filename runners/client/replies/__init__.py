"""What the server replies, by subject: the server sends these types, and the client reads them."""
