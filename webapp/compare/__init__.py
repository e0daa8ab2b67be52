"""Jobs beside each other: what was set, what was predicted, what was measured."""
