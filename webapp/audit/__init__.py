"""The history as proof: rows that cannot be changed unseen, and the page that shows them."""
